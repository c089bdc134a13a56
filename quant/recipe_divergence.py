"""The divergence of recipes, measured on held-out text: several in one pass over the layers."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trtc.protos.progress import Progress, counted
from trtc.quant.accuracy import Float64s
from trtc.quant.calibration_text import Int32s
from trtc.quant.gptq import Rounded
from trtc.quant.layer_source import LayerSource
from trtc.quant.layerwise import Batch, Stream, advance, logit_rows, logits_after, open_stream
from trtc.quant.logit_divergence import divergences, log_probabilities
from trtc.quant.recipe import FormatRecipe
from trtc.quant.rounded_sites import RoundedSites
from trtc.quant.site_format import BF16, site_of

_UNQUANTISED = FormatRecipe({})


@dataclass(frozen=True)
class Divergence:
    """Mean KL(unquantised || quantised) a token, in nats."""

    mean: float
    error: float
    """Its standard error."""


class RecipeMeter:
    """Measures recipes, each linear as it was rounded among others of its format.

    In memory at once are a layer in the formats of the recipes, and the hidden states of the text
    of each recipe.

    Args:
        source: it has its own weights after each call.
        texts: whose log-probabilities by the unquantised model are kept.
        tables: modules of tables that have formats, by their sites.
    """

    def __init__(
        self,
        source: LayerSource,
        texts: Sequence[Int32s],
        tables: Mapping[str, Any],
        rounded: RoundedSites,
        progress: Progress,
    ) -> None:
        model = source.model
        inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
        self._source = source
        self._texts = texts
        self._inputs = {site: one for site, one in tables.items() if one.weight is inputs.weight}
        self._outputs = {site: one for site, one in tables.items() if one.weight is outputs.weight}
        self._rounded = rounded
        self._progress = progress
        self._reference: list[list[torch.Tensor]] = []
        """Log-probabilities by the unquantised model, of each text in parts."""

    def measure(self, recipes: Sequence[FormatRecipe]) -> tuple[Divergence, ...]:
        """The divergence of each recipe."""
        if not recipes:
            return ()
        # The unquantised model goes with the first of them.
        every = tuple(recipes) if self._reference else (_UNQUANTISED, *recipes)
        streams, found = self._through(every), []
        phase = f"comparing what {len(every)} models predict"
        with _restored(self._outputs):
            turns = zip(streams, self._table_turns(self._outputs, every), strict=True)
            for stream, _ in counted(turns, phase, len(every), "models", self._progress):
                if self._reference:
                    found.append(self._divergence(stream))
                else:
                    self._reference = [
                        [log_probabilities(logits) for logits in self._logits(ids, batch)]
                        for ids, batch in zip(self._texts, stream, strict=True)
                    ]
        return tuple(found)

    def _through(self, recipes: Sequence[FormatRecipe]) -> list[Stream]:
        """The text after all layers, by recipe."""
        model, texts = self._source.model, self._texts
        with _restored(self._inputs):
            # Each alone: how many are computed at once changes the last bits.
            streams = [
                open_stream(model, texts, wide=False, batch=1)
                for _ in self._table_turns(self._inputs, recipes)
            ]
        phase = f"measuring {len(recipes)} models at once"
        indices = range(len(self._rounded.linears))
        with self._source.layers_only():
            for index in counted(indices, phase, len(indices), "layers", self._progress):
                linears = self._rounded.linears[index]
                with self._source.held(index) as layer, _restored(linears):
                    turns = self._layer_turns(index, recipes)
                    for stream, _ in zip(streams, turns, strict=True):
                        advance(layer, index, stream)
        return streams

    def _layer_turns(self, index: int, recipes: Sequence[FormatRecipe]) -> Iterator[None]:
        """As `_turns`, of a layer that is held."""
        linears = self._rounded.linears[index]
        wanted = {pair for one in recipes for pair in _formats(one, linears).items()}
        weights = self._rounded.of_layer(index, wanted)
        return _turns(linears, recipes, lambda name, to: weights[name].get(to))

    def _table_turns(
        self, tables: Mapping[str, Any], recipes: Sequence[FormatRecipe]
    ) -> Iterator[None]:
        """As `_turns`, of tables."""

        def rounded(site: str, to: str) -> Rounded | None:
            fits = site in self._rounded.fitting.get(to, ())
            return self._rounded.table(site, to, tables[site].weight.device) if fits else None

        return _turns(tables, recipes, rounded)

    def _logits(self, ids: Int32s, batch: Batch) -> Iterator[torch.Tensor]:
        """What may follow each token of a text [rows, vocab_size], in parts."""
        model = self._source.model
        for rows in logit_rows(model, len(ids)):
            with torch.inference_mode():
                logits = logits_after(model, ids[rows], batch.hidden[:, rows])
            yield logits

    def _divergence(self, stream: Stream) -> Divergence:
        """From the unquantised model, over all tokens that have one after them."""
        found: list[Float64s] = []
        for log_p, ids, batch in zip(self._reference, self._texts, stream, strict=True):
            parts = zip(log_p, self._logits(ids, batch), strict=True)
            kl = torch.cat([divergences(one, logits) for one, logits in parts])
            found.append(kl[:-1].cpu().numpy())
        tokens = np.concatenate(found)
        return Divergence(float(tokens.mean()), float(tokens.std() / math.sqrt(len(tokens))))


def _turns(
    modules: Mapping[str, Any],
    recipes: Sequence[FormatRecipe],
    rounded: Callable[[str, str], Rounded | None],
) -> Iterator[None]:
    """A turn for each recipe, in which modules have its weights. Weights that a recipe has as the
    one before it stay.

    Args:
        modules: linears by name, or tables by site, with their own weights.
        rounded: of a name and a format; None: its own weight is left as it is.
    """
    own = {name: module.weight.data for name, module in modules.items()}
    now: Mapping[str, str] = dict.fromkeys(modules, BF16.name)
    for recipe in recipes:
        formats = _formats(recipe, modules)
        for name, to in formats.items():
            if to != now[name]:
                modules[name].weight.data = own[name]  # lets go of the one before
                modules[name].weight.data = _values(own[name], rounded(name, to))
        now = formats
        yield


def _formats(recipe: FormatRecipe, names: Iterable[str]) -> dict[str, str]:
    """The formats of linears, or tables; of those that it says nothing of, bf16."""
    formats = recipe.names
    return {name: formats.get(site_of(name), BF16.name) for name in names}


def _values(own: torch.Tensor, rounded: Rounded | None) -> torch.Tensor:
    """What a weight becomes; None: itself."""
    if rounded is None:
        return own
    found = torch.empty_like(own)
    for rows, part in rounded.parts():
        found[rows] = part.values()
    return found


@contextmanager
def _restored(modules: Mapping[str, Any]) -> Iterator[None]:
    """Context manager at whose end modules have the weights again that they have now."""
    own = {name: module.weight.data for name, module in modules.items()}
    try:
        yield
    finally:
        for name, module in modules.items():
            module.weight.data = own[name]
