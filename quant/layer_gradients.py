"""Gradients of a model's activations, with a decoder layer in memory at a time.

A pass forward keeps what each layer is given on disk. On the way back each layer is computed again,
now with the graph that its gradients take. They are those of one graph through the whole model.
"""

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map

from trtc.protos.progress import Progress, counted
from trtc.quant.calibration_text import Int32s
from trtc.quant.journal import Journal
from trtc.quant.layer_source import LayerSource
from trtc.quant.layerwise import (
    Batch,
    advance,
    first_batch,
    layer_outputs,
    logit_rows,
    logits_after,
)


class LayerGradients:
    """Of the log-likelihood of labels that a model draws, sequence after sequence.

    Linears' hooks are called with gradients by their outputs in `from_logits`, in `through` each
    layer from the last to the first, and in `by_embeddings`, in this order.

    Args:
        source: no weight of it needs a gradient.
        kept: for hidden states.
        phase: what progress is reported as.
    """

    def __init__(
        self,
        source: LayerSource,
        sequences: Sequence[Int32s],
        kept: Journal,
        phase: str,
        progress: Progress,
    ) -> None:
        self._model = source.model
        self._sequences = sequences
        self._kept = kept
        self._phase = phase
        self._progress = progress
        self._batches = [_cut(_from_embeddings(self._model, ids)[1]) for ids in sequences]
        self._first = [batch.hidden for batch in self._batches]
        self._gradients: list[torch.Tensor] = []
        layers = range(len(self._model.base_model.layers))
        with source.layers_only():
            for index in counted(layers, f"{phase}, forward", len(layers), "layers", progress):
                with source.held(index) as layer:
                    advance(layer, index, self._batches)
                kept.save_streams(index, (batch.hidden for batch in self._batches))
        for batch in self._batches:
            for shared in _shared(batch, 0):
                shared.update(tree_map(_leaf, dict(shared)))

    def from_logits(self, generator: torch.Generator) -> None:
        """Draw labels, and go back to the last layer's outputs.

        Args:
            generator: on the model's device, where labels are drawn.
        """
        phase, total = f"{self._phase}, drawing labels", len(self._sequences)
        pairs = zip(self._sequences, self._batches, strict=True)
        for ids, batch in counted(pairs, phase, total, "sequences", self._progress):
            gradients = [
                self._from_rows(ids[rows], batch.hidden[:, rows], generator)
                for rows in logit_rows(self._model, len(ids))
            ]
            self._gradients.append(torch.cat(gradients, 1))

    def _from_rows(
        self, ids: Int32s, hidden: torch.Tensor, generator: torch.Generator
    ) -> torch.Tensor:
        """Gradients [1, rows, hidden_size] by the last layer's outputs for some tokens."""
        hidden = _leaf(hidden)
        logits = logits_after(self._model, ids, hidden).float()
        labels = _draw(logits.detach(), generator)
        loss = functional.cross_entropy(logits, labels, reduction="sum")
        torch.autograd.backward(loss)
        return _gradient(hidden)

    def through(self, layer: nn.Module, index: int) -> None:
        """Go back through a layer, which has its weights."""
        given = self._kept.streams(index - 1) if index else iter(self._first)
        for number, (batch, hidden) in enumerate(zip(self._batches, given, strict=True)):
            device = self._gradients[number].device
            batch.hidden = _leaf(hidden.to(device))
            before = [dict(shared) for shared in _shared(batch, index)]
            result, *_ = layer_outputs(layer, index, batch)
            ends = [(result, self._gradients[number])]
            for shared, leaves in zip(_shared(batch, index), before, strict=True):
                ends += _rewritten(shared, leaves)
            _backward(ends)
            self._gradients[number] = _gradient(batch.hidden)

    def by_embeddings(self) -> Iterator[torch.Tensor]:
        """The gradients by each sequence's embeddings [1, tokens, hidden_size]."""
        for number, ids in enumerate(self._sequences):
            embedded, batch = _from_embeddings(self._model, ids)
            ends = [(batch.hidden, self._gradients[number])]
            for graphs, leaves in zip(
                batch.arguments, self._batches[number].arguments, strict=True
            ):
                ends += [
                    (value, leaves[name].grad)
                    for name, value in graphs.items()
                    if _needs_gradient(value) and leaves[name].grad is not None
                ]
            _backward(ends)
            yield _gradient(embedded)


def _draw(logits: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """A label of each row, by what the logits say of it."""
    return torch.multinomial(torch.softmax(logits, -1), 1, generator=generator)[:, 0]


def _from_embeddings(model: Any, ids: Int32s) -> tuple[torch.Tensor, Batch]:
    """A sequence's embeddings, and the sequence before the first layer with the graph from them."""
    found: list[torch.Tensor] = []

    def begin(table: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        found.append(_leaf(output))
        return found[-1]

    handle = model.get_input_embeddings().register_forward_hook(begin)
    try:
        batch = first_batch(model, torch.from_numpy(ids.astype(np.int64))[None])
    finally:
        handle.remove()
    return found[0], batch


def _cut(batch: Batch) -> Batch:
    """The same without its graph: arguments that need gradients gather them."""
    arguments = (
        {name: _leaf(one) if _needs_gradient(one) else one for name, one in given.items()}
        for given in batch.arguments
    )
    return Batch(batch.hidden.detach(), tuple(arguments))


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_()


def _needs_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _shared(batch: Batch, index: int) -> list[MutableMapping[str, Any]]:
    """Where a layer leaves tensors for layers after it (Gemma 4's keys and values)."""
    return [one for one in batch.arguments[index].values() if isinstance(one, MutableMapping)]


def _rewritten(
    shared: MutableMapping[str, Any], leaves: Mapping[str, Any]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Tensors that a layer has left anew, with the gradients that layers after it gave the leaves
    which were in their place. No layer before it reads them."""
    found = []
    for key, leaf in leaves.items():
        if shared[key] is not leaf:
            pairs = zip(tree_leaves(shared[key]), tree_leaves(leaf), strict=True)
            found += [(new, old.grad) for new, old in pairs if old.grad is not None]
            del shared[key]
    return found


def _backward(ends: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    torch.autograd.backward([end for end, _ in ends], [gradient for _, gradient in ends])


def _gradient(leaf: torch.Tensor) -> torch.Tensor:
    assert leaf.grad is not None
    return leaf.grad
