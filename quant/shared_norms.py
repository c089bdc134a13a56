"""Norms that AWQ's factors may not move into, because something that is not quantised reads them.

nvidia-modelopt 0.47 multiplies a norm's weight by the factors of the quantised linears that share
its output, and takes the factors from these alone. A router, routed experts (which have factors of
their own), a shared expert's gate or a linear that is kept would be given other inputs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from trtc.quant.experts import SeparateExperts


@contextmanager
def norms_kept_for_others(model: nn.Module) -> Iterator[None]:
    """Within the block modelopt leaves such norms, and their readers' factors, as they are.

    Args:
        model: called without arguments, it computes some tokens.
    """
    from modelopt.torch.export import unified_export_hf as export

    kept = norms_read_otherwise(model)
    fold: Callable[[nn.Module, list[nn.Module]], None] = export.fuse_prequant_layernorm

    def fold_others(norm: nn.Module, linears: list[nn.Module]) -> None:
        if norm not in kept:
            fold(norm, linears)

    export.fuse_prequant_layernorm = fold_others
    try:
        yield
    finally:
        export.fuse_prequant_layernorm = fold


def norms_read_otherwise(model: nn.Module) -> frozenset[nn.Module]:
    """Norms whose output some module reads that modelopt has not quantised."""
    outputs: dict[int, tuple[nn.Module, torch.Tensor]] = {}
    found: set[nn.Module] = set()

    def record(norm: nn.Module, inputs: Any, output: Any) -> None:
        outputs[id(output)] = (norm, output)  # holds it, so that no other tensor has its id

    def check(reader: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        for value in (*inputs, *named.values()):
            if id(value) in outputs and not _takes_factors(reader):
                found.add(outputs[id(value)][0])

    hooks = [
        module.register_forward_pre_hook(check, with_kwargs=True) for module in model.modules()
    ]
    hooks += [
        module.register_forward_hook(record)
        for module in model.modules()
        if "Norm" in type(module).__name__
    ]
    try:
        model()
    finally:
        for hook in hooks:
            hook.remove()
    return frozenset(found)


def _takes_factors(reader: nn.Module) -> bool:
    """Whether a module may be given its input divided by factors: of one with parts, they decide,
    unless experts are among them, which get rows of it."""
    if any(isinstance(part, SeparateExperts) for part in reader.modules()):
        return False
    quantizer = getattr(reader, "weight_quantizer", None)
    if quantizer is not None:
        return bool(quantizer.is_enabled)
    return next(reader.children(), None) is not None or next(reader.parameters(), None) is None
