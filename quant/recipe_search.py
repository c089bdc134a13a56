"""Finds recipes: all weights in every format, scores by a backward pass, and what recipes cost.

The score of a format at a site estimates the divergence that it alone causes. Labels are drawn from
the model's own predictions, and g is the gradient of their log-likelihood by a linear's output.
Rounding changes the output by e; the divergence is then about half the mean of (g . e)^2 over
tokens, because the mean of g g^T is the Fisher information. Scores rank as measured divergences of
single sites do; the divergence of a whole recipe is measured.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from trtc.protos.progress import counted
from trtc.quant.accuracy import kl_divergence, log_softmax
from trtc.quant.calibration import CalibrationJob
from trtc.quant.calibration_text import MIN_EVAL_TOKENS, Int32s
from trtc.quant.device import device_of
from trtc.quant.evaluation import part_of
from trtc.quant.gptq import Rounded
from trtc.quant.gptq_layers import round_layers
from trtc.quant.linears import quantizable_linears
from trtc.quant.nearest import round_to_nearest
from trtc.quant.recipe import FormatRecipe
from trtc.quant.recipe_path import PathPoint, Scores, Shapes, recipe_path, within_bits
from trtc.quant.scheme import Gptq
from trtc.quant.side_thread import side_thread
from trtc.quant.site_format import BF16, EMBEDDING, FORMATS, LM_HEAD, TABLE_FORMATS, TABLES, site_of
from trtc.quant.table_rounding import round_table

SEARCHED = ("int4_g128", "iq4", "iq4_g16", "int6_g128", "int8_g128", "int8", "bf16")
"""Formats that a search chooses from."""
_SCORED_TOKENS = 8192
_SEED = 3
_MAX_KEPT_BYTES = 2 << 30
"""Of the unquantised model's log-probabilities; of more held-out text, a part is measured on."""
_DRAWN = 10
"""Parts of the path whose ends are measured for its picture."""
_Weights = Mapping[str, Mapping[str, Rounded]]
"""Format -> linear -> its rounded weight."""


@dataclass(frozen=True)
class Divergence:
    """Mean KL(unquantised || quantised) a token, in nats."""

    mean: float
    error: float
    """Its standard error."""


class RecipeSearch:
    """Scores and divergences of a model's sites and formats.

    In memory are the model and the codes of each format: a byte per weight and format.

    Args:
        job: its model is in f32 or bf16, and has its own weights after each call.
        tables: sites of tables that get a format as well (quant/site_format.py's TABLES).
    """

    def __init__(self, job: CalibrationJob, settings: Gptq, tables: Sequence[str] = ()) -> None:
        self._model = job.model
        self._texts = part_of(job.heldout, _most_tokens(job.model)).sequences
        self._modules: dict[str, Any] = {
            **dict(quantizable_linears(job.model)),
            **{site: module for site, module in _tables(job.model).items() if site in tables},
        }
        self.shapes: Shapes = {
            name: (module.weight.shape[0], module.weight.shape[1])
            for name, module in self._modules.items()
        }
        self._rounded = _round_all(job, self._modules, self.shapes, settings)
        self.scores = _scores(job, self._modules, self._rounded, settings)
        self.path = recipe_path(self.shapes, self.scores, SEARCHED)
        self._reference: list[Any] | None = None
        self._measured: dict[int, Divergence] = {}

    @property
    def num_weights(self) -> int:
        """Of all sites."""
        return sum(rows * columns for rows, columns in self.shapes.values())

    def within_bits(self, bits: float) -> PathPoint:
        """The recipe for a number of bits a weight."""
        return within_bits(self.path, self.shapes, self.scores, bits)

    def within_kl(self, kl: float) -> PathPoint | None:
        """The narrowest recipe of the path whose measured divergence, with one standard error more,
        is at most `kl`; None: not even the widest that quantises something."""
        last = len(self.path) - 1
        if all(name == BF16.name for name in self.path[last].recipe.names.values()):
            last -= 1
        low, high = 0, last + 1
        while low < high:
            middle = (low + high) // 2
            found = self._divergence_at(middle)
            if found.mean + found.error <= kl:
                high = middle
            else:
                low = middle + 1
        return self.path[low] if low <= last else None

    def frontier(self) -> tuple[tuple[PathPoint, Divergence], ...]:
        """Recipes along the path, and those that were measured before, with their divergences."""
        last = len(self.path) - 1
        places = {round(number * last / _DRAWN) for number in range(_DRAWN + 1)}
        return tuple(
            (self.path[place], self._divergence_at(place))
            for place in sorted(places | set(self._measured))
        )

    def measure(self, recipe: FormatRecipe) -> Divergence:
        """The divergence of a recipe on held-out text, each linear as it was rounded among others
        of its format."""
        if self._reference is None:
            self._reference = list(self._log_probabilities())
        own = {name: module.weight.data for name, module in self._modules.items()}
        formats = recipe.names
        try:
            for name, module in self._modules.items():
                to = formats[site_of(name)]
                if to in self._rounded and name in self._rounded[to]:
                    values = self._rounded[to][name].values()
                    module.weight.data = values.to(own[name])
            pairs = zip(self._reference, self._log_probabilities(), strict=True)
            kl = np.concatenate([kl_divergence(theirs, ours) for theirs, ours in pairs])
        finally:
            for name, module in self._modules.items():
                module.weight.data = own[name]
        return Divergence(float(kl.mean()), float(kl.std() / math.sqrt(len(kl))))

    def _divergence_at(self, place: int) -> Divergence:
        if place not in self._measured:
            self._measured[place] = self.measure(self.path[place].recipe)
        return self._measured[place]

    def _log_probabilities(self) -> Iterator[Any]:
        """Of every held-out sequence, those of all tokens but the first [tokens - 1, vocab]."""
        for ids in self._texts:
            with torch.inference_mode():
                logits = self._model(_row(self._model, ids), use_cache=False).logits[0, :-1]
            yield log_softmax(logits.float().cpu().numpy())


def _most_tokens(model: Any) -> int:
    """Whose log-probabilities are kept."""
    vocab_size: int = model.config.get_text_config().vocab_size
    return max(MIN_EVAL_TOKENS, _MAX_KEPT_BYTES // (8 * vocab_size))


def _row(model: Any, ids: Int32s) -> torch.Tensor:
    return torch.from_numpy(ids.astype(np.int64))[None].to(device_of(model))


def _tables(model: Any) -> dict[str, Any]:
    """The modules of a model's tables, by site: the lm_head where one table is both."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head.weight is embedding.weight:
        return {EMBEDDING: head}
    return {LM_HEAD: head, EMBEDDING: embedding}


def _round_all(
    job: CalibrationJob, modules: Mapping[str, Any], shapes: Shapes, settings: Gptq
) -> _Weights:
    """Every linear and every table in every format that fits it."""
    rounded: dict[str, dict[str, Rounded]] = {}
    for name in SEARCHED:
        to = FORMATS[name]
        fits = {one for one, shape in shapes.items() if not to.why_not(*shape)}
        fitting = {one: to for one in shapes if one in fits and one not in TABLES}
        if not to.is_quantized:
            continue
        if to.is_gptq:
            phase = f"rounding all linears to {name} on {job.tokens.num_tokens} tokens"
            rounded[name] = {}
            with side_thread() as side:
                for layer in round_layers(replace(job, phase=phase), fitting, settings, side):
                    rounded[name] |= {one: linear.copy() for one, linear in layer.linears.items()}
        else:
            rounded[name] = {
                one: round_to_nearest(modules[one].weight.data.float(), to) for one in fitting
            }
        for site in TABLES:
            if site in fits and name in TABLE_FORMATS:
                rounded[name][site] = round_table(modules[site].weight.data, to)
    return rounded


def _scores(
    job: CalibrationJob, modules: Mapping[str, Any], rounded: _Weights, settings: Gptq
) -> Scores:
    """The scores, or those that a search before has saved."""
    if job.journals is None:
        return _score(job, modules, rounded)
    formats = {name: sorted(weights) for name, weights in rounded.items()}
    journal = job.journals.of_run(("scores", formats, settings, _SCORED_TOKENS, _SEED))
    saved = journal.scores()
    if saved is not None:
        return saved
    scores = _score(job, modules, rounded)
    journal.save_scores(scores)
    return scores


def _score(job: CalibrationJob, modules: Mapping[str, Any], rounded: _Weights) -> Scores:
    """By a backward pass over a part of the calibration text."""
    model, totals = job.model, dict[tuple[str, str], float]()
    sequences, taken = [], 0
    for sequence in job.tokens.sequences:
        if taken < _SCORED_TOKENS:
            sequences.append(sequence)
            taken += len(sequence)
    model.requires_grad_(False)  # gradients are of activations alone
    # A lookup's output is the gradients' beginning, see `_backward`.
    embedding = model.get_input_embeddings()
    handles = [
        module.register_forward_hook(_scorer(name, rounded, totals))
        for name, module in modules.items()
        if module is not embedding
    ]
    generator = torch.Generator().manual_seed(_SEED)
    phase = f"scoring {len(rounded)} formats of every site on {taken} tokens"
    try:
        for ids in counted(sequences, phase, len(sequences), "sequences", job.progress):
            gradient = _backward(model, ids, generator)
            _score_lookups(model, ids, gradient, rounded, totals)
    finally:
        for handle in handles:
            handle.remove()
    return {key: total / (2 * taken) for key, total in totals.items()}


def _backward(model: Any, ids: Int32s, generator: torch.Generator) -> torch.Tensor:
    """Gradients of the log-likelihood of labels that the model draws; of activations alone.

    Returns:
        That by the embeddings, [1, tokens, hidden_size].
    """
    embedded = model.get_input_embeddings()(_row(model, ids)).detach().requires_grad_()
    logits = model(inputs_embeds=embedded, use_cache=False).logits[0].float()
    # Drawn on the CPU, whose random numbers are the same everywhere.
    odds = torch.softmax(logits.detach().cpu(), -1)
    labels = torch.multinomial(odds, 1, generator=generator)[:, 0]
    functional.cross_entropy(logits, labels.to(logits.device), reduction="sum").backward()  # type: ignore[no-untyped-call]
    gradient: torch.Tensor = embedded.grad
    return gradient


def _score_lookups(
    model: Any,
    ids: Int32s,
    gradient: torch.Tensor,
    rounded: _Weights,
    totals: dict[tuple[str, str], float],
) -> None:
    """Add what rounded embeddings change."""
    table = model.get_input_embeddings()
    own = table.weight.data
    for to, weights in rounded.items():
        if EMBEDDING not in weights:
            continue
        delta = weights[EMBEDDING].values().to(own.device) - own.float()
        try:
            table.weight.data = delta  # some models scale what they look up
            with torch.inference_mode():
                error = table(_row(model, ids))
        finally:
            table.weight.data = own
        _add(totals, (EMBEDDING, to), error.float(), gradient)


def _add(
    totals: dict[tuple[str, str], float],
    key: tuple[str, str],
    error: torch.Tensor,
    gradient: torch.Tensor,
) -> None:
    """Add (g . e)^2 of every token to a score."""
    change = (error * gradient.float()).sum(-1)
    totals[key] = totals.get(key, 0.0) + float(change.double().square().sum())


def _scorer(
    name: str, rounded: _Weights, totals: dict[tuple[str, str], float]
) -> Callable[..., None]:
    def forward(linear: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        x = inputs[0].detach()
        if output.requires_grad:
            call: Any = output.register_hook
            call(lambda gradient: add(linear, x, gradient))

    def add(linear: Any, x: torch.Tensor, gradient: torch.Tensor) -> None:
        for to, weights in rounded.items():
            if name in weights:
                delta = weights[name].values().to(x.device) - linear.weight.data.float()
                error = functional.linear(x.float(), delta)
                _add(totals, (site_of(name), to), error, gradient)

    return forward
