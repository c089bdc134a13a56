"""A model run one decoder layer at a time, so that no more than a layer of it is in memory.

A stream holds the hidden states that sequences have before some layer, and what the model passes to
every layer besides: masks, positions, rotations. Calibration computes layers in f32, whatever the
checkpoint is stored in.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from trtc.quant.calibration_text import Int32s, TokenSet
from trtc.quant.device import device_of
from trtc.quant.experts import SeparateExperts
from trtc.quant.layer_source import LayerSource
from trtc.quant.pinned import on_cpu
from trtc.quant.wide_linears import wide_linears

BATCH = 4
"""Sequences that are computed at once."""
_CARRIED = "prev_topk_indices"
"""What a layer of GLM-5 gives beside its hidden states; the next one takes it by this name."""
_LOGIT_BYTES = 1 << 30
"""Of logits in f32 that are there at once: a window's, unless the vocabulary exceeds 524,288."""
_NUMBER = re.compile(r"\.\d+\.")


@dataclass
class Batch:
    """Sequences of one length between two layers."""

    hidden: torch.Tensor
    """[sequences, tokens, hidden_size]."""
    arguments: tuple[dict[str, Any], ...]
    """Other arguments of each layer."""


Stream = list[Batch]


@dataclass(frozen=True)
class Site:
    """Linears of a layer that get the same input."""

    linears: tuple[str, ...]
    """Names within the layer, in its order."""
    routed: bool = False
    """Whether a router decides which tokens it gets."""


Stage = tuple[Site, ...]
"""Sites whose inputs depend on the stages before, and not on each other."""


def open_stream(
    model: Any, sequences: Sequence[Int32s], *, wide: bool = True, batch: int = BATCH
) -> Stream:
    """Sequences before the first layer.

    Args:
        model: a Transformers causal language model, whose decoder layers need no weights.
        wide: in f32, whatever the model is in.
        batch: sequences of one length that are computed at once, at most.
    """
    with _wide_embeddings(model) if wide else nullcontext(), torch.no_grad():
        return [first_batch(model, ids) for ids in _equal_lengths(sequences, batch)]


def first_batch(model: Any, ids: torch.Tensor) -> Batch:
    """Sequences [sequences, tokens] before the first layer."""
    with _standing_in(model, lambda given: given) as calls:
        model.base_model(ids.to(device_of(model)), use_cache=False)
    return Batch(calls[0][0], tuple(arguments for _, arguments in calls))


def run_layer(layer: nn.Module, index: int, stream: Stream) -> Iterator[torch.Tensor]:
    """The outputs [sequences, tokens, hidden_size] of a layer, batch after batch."""
    for batch in stream:
        with torch.no_grad():
            hidden, *_ = layer_outputs(layer, index, batch)
        yield hidden


def advance(layer: nn.Module, index: int, stream: Stream) -> None:
    """Replace a stream's hidden states by a layer's outputs."""
    for batch in stream:
        with torch.no_grad():
            batch.hidden, *others = layer_outputs(layer, index, batch)
        for arguments in batch.arguments[index + 1 : index + 2]:
            if _CARRIED in arguments:
                arguments[_CARRIED] = others[0]


def states_of(stream: Stream) -> list[torch.Tensor]:
    """A stream's hidden states, in the CPU's memory (quant/pinned.py)."""
    return [on_cpu(batch.hidden) for batch in stream]


def restore(stream: Stream, states: Iterable[torch.Tensor]) -> None:
    """Take a stream to where `states_of` gave its hidden states.

    They are copied into memory that PyTorch aligns, as files are not: a BLAS may round otherwise.
    """
    for batch, hidden in zip(stream, states, strict=True):
        batch.hidden = hidden.to(batch.hidden.device, copy=True)


def layer_outputs(layer: nn.Module, index: int, batch: Batch) -> tuple[torch.Tensor, ...]:
    """What a layer gives for a batch, hidden states first."""
    result = layer(batch.hidden, **batch.arguments[index])
    return result if isinstance(result, tuple) else (result,)


def carries_more(model: Any) -> bool:
    """Whether a layer needs more of those before it than hidden states: what they selected, or
    their keys and values."""
    shares = bool(getattr(model.config.get_text_config(), "num_kv_shared_layers", 0))
    return shares or any(_CARRIED in _parameters(layer) for layer in model.base_model.layers)


def _parameters(layer: nn.Module) -> list[str]:
    return list(inspect.signature(layer.forward).parameters)


def run_layers(source: LayerSource, stream: Stream) -> None:
    """Take a stream through all layers, each of which is in memory once."""
    with source.layers_only():
        for index in range(len(source.model.base_model.layers)):
            with source.held(index) as layer:
                advance(layer, index, stream)


def run_text(source: LayerSource, tokens: TokenSet) -> None:
    """Run windows through a model's decoder layers, in the type that they are in."""
    with wide_linears():
        run_layers(source, open_stream(source.model, tokens.sequences, wide=False))


def logits_after(model: Any, ids: Int32s, hidden: torch.Tensor) -> torch.Tensor:
    """What a model gives for a sequence of which it has gone through all layers.

    Args:
        hidden: [1, tokens, hidden_size] after the last of them.

    Returns:
        [tokens, vocab_size].
    """
    with _standing_in(model, lambda given: hidden):
        row = torch.from_numpy(ids.astype(np.int64))[None].to(device_of(model))
        logits: torch.Tensor = model(row, use_cache=False).logits[0]
    return logits


def logit_rows(model: Any, num_tokens: int) -> Iterator[slice]:
    """Tokens of a sequence whose logits are computed at once."""
    step = rows_at_once(model.config.get_text_config().vocab_size)
    for begin in range(0, num_tokens, step):
        yield slice(begin, min(begin + step, num_tokens))


def rows_at_once(vocab_size: int) -> int:
    """How many tokens they are, at most."""
    return max(1, _LOGIT_BYTES // (4 * vocab_size))


def find_stages(
    layer: nn.Module, names: Sequence[str], index: int, stream: Stream
) -> tuple[Stage, ...]:
    """The sites of a layer in the order in which it computes them.

    Order and shared inputs of all experts are those of an expert that the first batch reaches.

    Args:
        names: the linears to look for, within the layer.
    """
    calls: list[tuple[str, torch.Tensor]] = []

    def record(name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        return lambda module, inputs: calls.append((name, inputs[0]))

    with hooked(layer, {name: record(name) for name in names}):
        next(run_layer(layer, index, stream[:1]))
    order: dict[tuple[str, int], list[str]] = {}
    for name, x in calls:
        kinds = order.setdefault((_kind(name.rpartition(".")[0]), id(x)), [])
        if _kind(name) not in kinds:
            kinds.append(_kind(name))
    shared = list(dict.fromkeys(tuple(kinds) for kinds in order.values()))
    unseen = {_kind(name) for name in names} - {kind for kinds in shared for kind in kinds}
    shared += [(kind,) for kind in sorted(unseen)]
    routed = _routed(layer)
    return tuple(_stage(kinds, names, routed) for kinds in shared)


def _stage(kinds: tuple[str, ...], names: Sequence[str], routed: tuple[str, ...]) -> Stage:
    sites: dict[str, list[str]] = {}
    for name in names:
        if _kind(name) in kinds:
            sites.setdefault(name.rpartition(".")[0], []).append(name)
    return tuple(
        Site(tuple(linears), any(linears[0].startswith(f"{prefix}.") for prefix in routed))
        for linears in sites.values()
    )


def _kind(name: str) -> str:
    """A linear's name without its expert's number."""
    return _NUMBER.sub(".#.", f"{name}.").removesuffix(".")


def _routed(layer: nn.Module) -> tuple[str, ...]:
    return tuple(
        name for name, module in layer.named_modules() if isinstance(module, SeparateExperts)
    )


@contextmanager
def hooked(layer: nn.Module, hooks: dict[str, Callable[..., None]]) -> Iterator[None]:
    """Within the block, linears call their hook with (linear, inputs) before they compute."""
    handles = [
        layer.get_submodule(name).register_forward_pre_hook(hook) for name, hook in hooks.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


_Call = tuple[torch.Tensor, dict[str, Any]]
"""Hidden states that a layer is given, and its other arguments by name."""


@contextmanager
def _standing_in(
    model: Any, result: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[list[_Call]]:
    """Within the block, the model's layers compute nothing: each records what it is called with,
    and gives `result` of its hidden states."""
    calls: list[_Call] = []

    def stand_in(layer: nn.Module) -> Callable[..., Any]:
        # Arguments by position have the names that come after the hidden states.
        _, *names = _parameters(layer)

        def record(hidden: torch.Tensor, *given: Any, **arguments: Any) -> Any:
            calls.append((hidden, dict(zip(names, given, strict=False)) | arguments))
            return (result(hidden), None) if _CARRIED in names else result(hidden)

        return record

    layers = model.base_model.layers
    for layer in layers:
        layer.forward = stand_in(layer)
    try:
        yield calls
    finally:
        for layer in layers:
            del layer.forward


@contextmanager
def _wide_embeddings(model: Any) -> Iterator[None]:
    """Context manager under which what follows from the embeddings is f32, including rotations,
    masks and what linears before the layers give."""
    linears = [
        (one, one.weight.dtype) for one in model.base_model.children() if isinstance(one, nn.Linear)
    ]
    handle = model.get_input_embeddings().register_forward_hook(
        lambda module, inputs, output: output.float()
    )
    for linear, _ in linears:
        linear.float()
    try:
        yield
    finally:
        handle.remove()
        for linear, dtype in linears:
            linear.to(dtype)


def _equal_lengths(sequences: Sequence[Int32s], batch: int) -> Iterator[torch.Tensor]:
    """Batches [sequences, tokens] of neighbours of one length."""
    begin = 0
    while begin < len(sequences):
        end = begin + 1
        while end < min(begin + batch, len(sequences)) and len(sequences[end]) == len(
            sequences[begin]
        ):
            end += 1
        yield torch.from_numpy(np.stack(sequences[begin:end]).astype(np.int64))
        begin = end
