"""Routed experts as separate linears, so that each is calibrated, quantised and exported alone.

Transformers keeps all experts of a layer in one three-dimensional parameter. nvidia-modelopt 0.47
gives those one input scale for all experts, does not smooth them for AWQ or SmoothQuant, and cannot
export them with AWQ; linears it treats in full.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from trtc.protos.errors import UnsupportedError

_PROJ = ("gate_proj", "up_proj", "down_proj")
_NUMBERED = ("w1", "w3", "w2")
_LINEAR_NAMES: Mapping[str, tuple[str, ...]] = {
    "DeepseekV2Experts": _PROJ,
    "DeepseekV3Experts": _PROJ,
    "DeepseekV32Experts": _PROJ,
    "Ernie4_5_MoeExperts": _PROJ,
    "Gemma4TextExperts": _PROJ,
    "Glm4MoeExperts": _PROJ,
    "Glm4MoeLiteExperts": _PROJ,
    "GlmMoeDsaExperts": _PROJ,
    "GraniteMoeExperts": _PROJ,
    "GraniteMoeHybridExperts": _PROJ,
    "GraniteMoeSharedExperts": _PROJ,
    "HunYuanMoEV1Experts": _PROJ,
    "JambaExperts": _PROJ,
    "KimiLinearExperts": _NUMBERED,
    "Lfm2MoeExperts": _NUMBERED,
    "Llama4TextExperts": _PROJ,
    "MiniMaxM2Experts": _NUMBERED,
    "Mistral4Experts": _PROJ,
    "MixtralExperts": _NUMBERED,
    "NemotronHExperts": ("up_proj", "down_proj"),
    "OlmoeExperts": _PROJ,
    "PhimoeExperts": _NUMBERED,
    "Qwen2MoeExperts": _PROJ,
    "Qwen3MoeExperts": _PROJ,
    "Qwen3NextExperts": _PROJ,
    "Qwen3_5MoeExperts": _PROJ,
}
"""Gate, if there is one, up and down as checkpoints name them, by Transformers' class. They all
compute down(act_fn(gate(x)) * up(x)), with gate's rows first where gate and up are one tensor."""
_TRANSPOSED = "Llama4TextExperts"
"""Its tensors are [E, H, 2 * I] and [E, I, H]."""

STARVED_TOKENS = 64
"""An expert that calibration routes fewer tokens to has no statistics of its own."""


class _Expert(nn.Module):
    def __init__(
        self, names: tuple[str, ...], gate_up: torch.Tensor, down: torch.Tensor, act: nn.Module
    ) -> None:
        super().__init__()
        self._names = names
        self.act_fn = act
        before = gate_up.chunk(len(names) - 1, dim=0)
        for name, weight in zip(names, (*before, down), strict=True):
            self.add_module(name, _linear(weight))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, *others, down = (self.get_submodule(name) for name in self._names)
        inner = self.act_fn(first(x))
        for up in others:
            inner = inner * up(x)
        return cast(torch.Tensor, down(inner))


class SeparateExperts(nn.Module):
    """The experts of one layer, called as Transformers calls its fused ones.

    Indexed, but deliberately not iterable: nvidia-modelopt gives the experts that it can iterate
    over one common input scale, and at export the larger of gate's and up's weight scales, block
    by block, which costs accuracy for nothing here.

    `tokens_seen` counts the tokens routed to each expert since `collecting` was set. While
    `collecting`, starved experts also compute every token of their layer, so that they have
    activation statistics; that output is dropped.
    """

    def __init__(self, fused: nn.Module, names: tuple[str, ...]) -> None:
        fused_name = "gate_up_proj" if len(names) == 3 else "up_proj"
        gate_up = cast(torch.Tensor, getattr(fused, fused_name)).detach()
        down = cast(torch.Tensor, fused.down_proj).detach()
        if type(fused).__name__ == _TRANSPOSED:
            gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
        act = cast(nn.Module, fused.act_fn)
        super().__init__()
        for number, weights in enumerate(zip(gate_up, down, strict=True)):
            self.add_module(str(number), _Expert(names, *weights, act))
        self.tokens_seen = [0] * len(self)
        self.starved: frozenset[int] = frozenset()
        self.collecting = False

    def __len__(self) -> int:
        return len(self._modules)

    def __getitem__(self, number: int) -> nn.Module:
        return self.get_submodule(str(number))

    def forward(
        self,
        hidden: torch.Tensor,
        top_k_index: torch.Tensor | None = None,
        top_k_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[T, H] hidden, [T, k] chosen experts and their weights -> [T, H].

        Of Llama 4 [E * T, H], every expert's rows by their weights, -> [E * T, H].
        """
        if top_k_index is None or top_k_weights is None:
            return self._weighted_rows(hidden)
        combined = torch.zeros_like(hidden)
        for number in range(len(self)):
            expert = self[number]
            rows, position = torch.where(top_k_index == number)
            self.tokens_seen[number] += len(rows) if self.collecting else 0
            if self.collecting and number in self.starved:
                expert(hidden)
            if len(rows):
                weighted = expert(hidden[rows]) * top_k_weights[rows, position, None]
                combined.index_add_(0, rows, weighted.to(combined.dtype))
        return combined

    def _weighted_rows(self, hidden: torch.Tensor) -> torch.Tensor:
        """Rows that chose other experts have been multiplied by 0, and give 0."""
        found = torch.zeros_like(hidden)
        parts = zip(hidden.chunk(len(self)), found.chunk(len(self)), strict=True)
        for number, (given, out) in enumerate(parts):
            rows = given.any(dim=1)
            count = int(rows.sum())
            self.tokens_seen[number] += count if self.collecting else 0
            if self.collecting and number in self.starved:
                # Rows that chose others are lost; what those read stands in.
                self[number](sum(hidden.chunk(len(self))))
            if count:
                out[rows] = self[number](given[rows])
        return found


def _linear(weight: torch.Tensor) -> nn.Linear:
    rows, columns = weight.shape
    linear = nn.Linear(columns, rows, bias=False, device="meta", dtype=weight.dtype)
    linear.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
    return linear


def separate_experts(model: Any) -> tuple[SeparateExperts, ...]:
    """Replace every fused expert module of `model` by a `SeparateExperts`.

    Raises:
        UnsupportedError: fused experts of a class whose linears trtc cannot name.
    """
    replaced = []
    for path, module in list(model.named_modules()):
        experts = separated(module)
        if experts is not None:
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, experts)
            replaced.append(experts)
        elif getattr(module, "gate_up_proj", None) is not None and _is_fused(module):
            raise UnsupportedError(
                f"are {type(module).__name__}, which trtc cannot quantise",
                field=path,
                remedy="Build with --dtype bf16, or give a quantised checkpoint",
            )
    return tuple(replaced)


def separated(module: nn.Module) -> SeparateExperts | None:
    """The experts of a module of Transformers', which keep its weights; None: it has none."""
    names = _LINEAR_NAMES.get(type(module).__name__)
    return None if names is None else SeparateExperts(module, names)


def prepare_export() -> None:
    """Keep nvidia-modelopt's export from filling in scales of experts."""
    from modelopt.torch.export.registry import PrepareMoEInputsRegistry

    PrepareMoEInputsRegistry.register(SeparateExperts)(_nothing_to_fill_in)


@contextmanager
def own_factors() -> Iterator[None]:
    """Within the block every expert keeps the factors that AWQ found for it.

    trtc.moe takes them so. modelopt makes one of all experts' factors in the models that it lists,
    and fails in others whose block it takes for a mixture (OLMoE, Llama 4).
    """
    from modelopt.torch.export import unified_export_hf as export

    listed = export.get_experts_list
    export.get_experts_list = _no_experts
    try:
        yield
    finally:
        export.get_experts_list = listed


def _no_experts(module: nn.Module, model_type: str) -> list[Any]:
    """Groups of experts that share their factors."""
    return []


def _nothing_to_fill_in(name: str, moe_block: nn.Module, context: Any) -> None:
    """Does nothing: every expert was calibrated, on its own tokens or on all of its layer's."""


def _is_fused(module: nn.Module) -> bool:
    gate_up = getattr(module, "gate_up_proj", None)
    return isinstance(gate_up, nn.Parameter) and gate_up.dim() == 3
