"""The search for AWQ's scales in nvidia-modelopt's algorithm, by Gram matrices.

AWQ multiplies a weight's input channels by s = act^a / weight^(1-a) before it is rounded, divides
the input by s, and takes the exponent `a` that changes the linear's output least. modelopt computes
that output for every exponent and every batch of text, and rounds the weight anew for each.
The same loss is

    |x W^T - (x/s) Q(W s)^T|^2 = sum(D G * D)    D = W - Q(W s)/s,  G = x^T x

so G [K, K] is made once of all tokens, and an exponent costs one rounding of the weight and one
product [N, K] x [K, K]: independent of how long the text is.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

Forward = Callable[[Any], None]
_MIN_SCALE, _MAX_SCALE = 1e-4, 1e4


def with_fast_search(forward: Forward, search: Forward) -> Forward:
    """The loop to give modelopt: its first call gathers statistics, its second one searches.

    Args:
        forward: runs the text through the model.
        search: likewise; few large batches are faster.
    """
    calls = iter((forward, lambda model: _search(model, search)))
    return lambda model: next(calls)(model)


def _search(model: nn.Module, forward: Forward) -> None:
    """Compute what modelopt's search would: the loss of every exponent of every linear."""
    modules: Iterator[Any] = model.modules()
    linears = [m for m in modules if hasattr(m, "awq_lite") and m.awq_lite.is_enabled]
    grams = _Grams()
    with _plain_forward(linears):
        hooks = [linear.register_forward_pre_hook(grams.search) for linear in linears]
        forward(model)
        for hook in hooks:
            hook.remove()


@contextmanager
def _plain_forward(linears: list[Any]) -> Iterator[None]:
    """Let modelopt's patched linears compute their unquantised output and nothing else."""
    for linear in linears:
        linear.awq_lite.is_enabled = False
    try:
        yield
    finally:
        for linear in linears:
            linear.awq_lite.is_enabled = True


class _Grams:
    """Linears that share an input, as q, k and v do, share its Gram matrix."""

    def __init__(self) -> None:
        self._input = torch.empty(0)
        self._gram = torch.empty(0)

    def search(self, linear: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        """A forward pre-hook; a linear that gets no token (an expert) learns nothing."""
        x = inputs[0]
        if not x.numel():
            return
        if x is not self._input:
            rows = x.reshape(-1, x.shape[-1]).float()
            self._input, self._gram = x, rows.T @ rows / len(rows)
        state = linear.awq_lite
        for exponent in state.loss:
            scale = _scale(state.act_scale, state.weight_scale, exponent)
            state.loss[exponent] += _loss(linear, self._gram, scale)
        state.num_search_steps += 1


def _scale(activation: torch.Tensor, weight: torch.Tensor, exponent: float) -> torch.Tensor:
    """[K], centred so that its largest and smallest values are reciprocal; as in modelopt."""
    tiny = torch.finfo(torch.float32).tiny
    scale = activation.pow(exponent) / (weight.to(activation.device).pow(1 - exponent) + tiny)
    scale = scale.clamp(_MIN_SCALE, _MAX_SCALE).view(-1)
    return scale / (scale.max() * scale.min()).sqrt()


def _loss(linear: Any, gram: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Mean square of what rounding changes in the outputs."""
    weight = linear.weight
    linear.weight_quantizer.pre_quant_scale = scale.to(weight.dtype)
    rounded = linear.weight_quantizer(weight)
    del linear.weight_quantizer._pre_quant_scale
    change = weight.float() - rounded.float() * (1 / scale).to(weight.dtype).float()
    loss: torch.Tensor = (change @ gram * change).sum() / len(weight)
    return loss
