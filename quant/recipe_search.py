"""Finds recipes: every linear in every format, scores by a backward pass, and what recipes cost.

The score of a format at a site estimates the divergence that it alone causes. Labels are drawn from
the model's own predictions, and g is the gradient of their log-likelihood by a linear's output.
Rounding changes the output by e; the divergence is then about half the mean of (g . e)^2 over
tokens, because the mean of g g^T is the Fisher information. Scores rank as measured divergences of
single sites do; the divergence of a whole recipe is measured.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
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
from trtc.quant.site_format import FORMATS, site_of

SEARCHED = ("int4_g128", "iq4", "iq4_g16", "int8_g128", "int8", "bf16")
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
    """

    def __init__(self, job: CalibrationJob, settings: Gptq) -> None:
        self._model = job.model
        self._texts = part_of(job.heldout, _most_tokens(job.model)).sequences
        self._linears: dict[str, Any] = dict(quantizable_linears(job.model))
        self.shapes: Shapes = {
            name: (linear.out_features, linear.in_features)
            for name, linear in self._linears.items()
        }
        self._rounded = _round_all(job, self.shapes, settings)
        self.scores = _score(job, self._linears, self._rounded)
        self.path = recipe_path(self.shapes, self.scores, SEARCHED)
        self._reference: list[Any] | None = None
        self._measured: dict[int, Divergence] = {}

    def within_bits(self, bits: float) -> PathPoint:
        """The recipe for a number of bits a weight."""
        return within_bits(self.path, self.shapes, self.scores, bits)

    def within_kl(self, kl: float) -> PathPoint | None:
        """The narrowest recipe of the path whose measured divergence, with one standard error more,
        is at most `kl`; None: not even the widest that quantises something."""
        last = len(self.path) - 1
        if not self.path[last].recipe.is_quantized:
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
        own = {name: linear.weight.data for name, linear in self._linears.items()}
        try:
            for name, linear in self._linears.items():
                to = recipe.formats[site_of(name)].name
                if to in self._rounded and name in self._rounded[to]:
                    values = self._rounded[to][name].values()
                    linear.weight.data = values.to(own[name])
            pairs = zip(self._reference, self._log_probabilities(), strict=True)
            kl = np.concatenate([kl_divergence(theirs, ours) for theirs, ours in pairs])
        finally:
            for name, linear in self._linears.items():
                linear.weight.data = own[name]
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


def _round_all(job: CalibrationJob, shapes: Shapes, settings: Gptq) -> _Weights:
    """Every linear in every format that fits it."""
    rounded: dict[str, dict[str, Rounded]] = {}
    linears = dict(quantizable_linears(job.model))
    for name in SEARCHED:
        to = FORMATS[name]
        fitting = {one: to for one, shape in shapes.items() if not to.why_not(*shape)}
        if to.is_gptq:
            phased = CalibrationJob(
                job.model,
                job.model_dir,
                job.output_dir,
                job.tokens,
                job.heldout,
                f"rounding all linears to {name} on {job.tokens.num_tokens} tokens",
                job.progress,
            )
            rounded[name] = {}
            for layer in round_layers(phased, fitting, settings):
                rounded[name] |= layer.linears
        elif to.is_quantized:
            rounded[name] = {
                one: round_to_nearest(linears[one].weight.data.float(), to) for one in fitting
            }
    return rounded


def _score(job: CalibrationJob, linears: Mapping[str, Any], rounded: _Weights) -> Scores:
    """By a backward pass over a part of the calibration text."""
    model, totals = job.model, dict[tuple[str, str], float]()
    sequences, taken = [], 0
    for sequence in job.tokens.sequences:
        if taken < _SCORED_TOKENS:
            sequences.append(sequence)
            taken += len(sequence)
    model.requires_grad_(False)  # gradients are of activations alone
    handles = [
        linear.register_forward_hook(_scorer(name, rounded, totals))
        for name, linear in linears.items()
    ]
    generator = torch.Generator().manual_seed(_SEED)
    phase = f"scoring {len(rounded)} formats of every site on {taken} tokens"
    try:
        for ids in counted(sequences, phase, len(sequences), "sequences", job.progress):
            _backward(model, ids, generator)
    finally:
        for handle in handles:
            handle.remove()
    return {key: total / (2 * taken) for key, total in totals.items()}


def _backward(model: Any, ids: Int32s, generator: torch.Generator) -> None:
    """Gradients of the log-likelihood of labels that the model draws; of activations alone."""
    embedded = model.get_input_embeddings()(_row(model, ids)).detach().requires_grad_()
    logits = model(inputs_embeds=embedded, use_cache=False).logits[0].float()
    # Drawn on the CPU, whose random numbers are the same everywhere.
    odds = torch.softmax(logits.detach().cpu(), -1)
    labels = torch.multinomial(odds, 1, generator=generator)[:, 0]
    functional.cross_entropy(logits, labels.to(logits.device), reduction="sum").backward()  # type: ignore[no-untyped-call]


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
                change = (error * gradient.float()).sum(-1)
                key = (site_of(name), to)
                totals[key] = totals.get(key, 0.0) + float(change.double().square().sum())

    return forward
