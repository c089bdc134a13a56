"""What cuBLASLt computes, by torch."""

import torch


def library_product(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    input_scale: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    row_scale: torch.Tensor | None = None,
) -> None:
    """Write x [M, K] @ weight [N, K].T to out [M, N]: f32 sums, rounded once.

    Args:
        input_scale: f32 [1].
        weight_scale: f32 [N].
        residual: [M, N].
        bias: f32 [N].
        row_scale: f32 [M].
    """
    total = x.float() @ weight.float().T
    for scale in (input_scale, weight_scale):
        if scale is not None:
            total *= scale
    if row_scale is not None:
        total *= row_scale[:, None]
    for term in (residual, bias):
        if term is not None:
            total += term.float()
    out.copy_(total)
