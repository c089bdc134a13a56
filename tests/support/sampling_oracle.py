"""Sampling one row at a time, in Python floats: what samplers are compared with."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from msgspec.structs import replace
from numpy.typing import NDArray

from trtc.protos.sampling import SamplingParams
from trtc.runtime.sampling.sampler import NO_PENDING, SamplingBatch, TokenCounts

Float32s = NDArray[np.float32]

params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.1, 0.7, 1.0, 1.0, 3.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 5, 40, 10_000]),
    top_p=st.sampled_from([1.0, 1.0, 0.05, 0.5, 0.9, 0.999]),
    min_p=st.sampled_from([0.0, 0.0, 0.02, 0.3, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.7, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.0, -1.5, 1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.5, 2.0]),
    logit_bias=st.dictionaries(st.integers(0, 9), st.sampled_from([-100.0, -2.0, 5.0]), max_size=3),
    seed=st.integers(0, 2**64 - 1),
)
"""Every kind of row; biases are on tokens 0 to 9."""


@dataclass(frozen=True)
class Case:
    """Rows after prompts and outputs of their own; row n has drawn n tokens."""

    params: tuple[SamplingParams, ...]
    logits: Float32s
    prompts: tuple[list[int], ...]
    outputs: tuple[list[int], ...]

    @property
    def batch(self) -> SamplingBatch:
        counts = {
            row: counts_of(self.prompts[row], self.outputs[row])
            for row, params in enumerate(self.params)
            if is_penalised(params)
        }
        positions = [len(output) for output in self.outputs]
        return SamplingBatch.of(self.params, position=positions, counts=counts)

    def scores(self, row: int) -> list[float]:
        return edited(self.logits[row], self.params[row], self.prompts[row], self.outputs[row])


def with_last_pending(case: Case, seed: int) -> tuple[SamplingBatch, NDArray[np.int32]]:
    """A case's batch without the last token of each output, where penalties look at it: that is
    pending. And what the step before drew."""
    rng = np.random.default_rng(seed)
    rows, vocab_size = case.logits.shape
    sampled = rng.integers(0, vocab_size, rows + 1).astype(np.int32)
    pending, counts = np.full(rows, NO_PENDING, np.int32), {}
    sources = rng.permutation(rows + 1)
    for row, (params, output) in enumerate(zip(case.params, case.outputs, strict=True)):
        if is_penalised(params):
            counts[row] = counts_of(case.prompts[row], output[:-1])
            if output:
                pending[row] = sources[row]
                sampled[sources[row]] = output[-1]
    positions = [len(output) for output in case.outputs]
    batch = SamplingBatch.of(case.params, position=positions, counts=counts)
    return replace(batch, pending=pending), sampled


def cases(vocab_sizes: Sequence[int]) -> st.SearchStrategy[Case]:
    """One to six rows of every kind, with logits near each other and far apart."""
    return st.builds(
        _random_case,
        params=st.lists(params_strategy, min_size=1, max_size=6),
        vocab_size=st.sampled_from(vocab_sizes),
        data_seed=st.integers(0, 2**32 - 1),
        spread=st.sampled_from([0.5, 3.0, 15.0]),
    )


def _random_case(
    params: list[SamplingParams], vocab_size: int, data_seed: int, spread: float
) -> Case:
    rng = np.random.default_rng(data_seed)
    return Case(
        params=tuple(params),
        logits=(rng.normal(size=(len(params), vocab_size)) * spread).astype(np.float32),
        prompts=tuple(rng.integers(0, vocab_size, 8).tolist() for _ in params),
        outputs=tuple(rng.integers(0, vocab_size, row).tolist() for row in range(len(params))),
    )


def is_penalised(params: SamplingParams) -> bool:
    return (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (
        1,
        0,
        0,
    )


def counts_of(prompt: Sequence[int], output: Sequence[int]) -> TokenCounts:
    seen = sorted({*prompt, *output})
    return TokenCounts(
        np.array(seen, np.int32), np.array([output.count(token) for token in seen], np.int32)
    )


def edited(
    logits: Float32s, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> list[float]:
    scores = [float(value) for value in logits]
    for token, bias in params.logit_bias.items():
        scores[token] += bias
    for token in {*prompt, *output}:
        if scores[token] > 0:
            scores[token] /= params.repetition_penalty
        else:
            scores[token] *= params.repetition_penalty
        if token in output:
            scores[token] -= params.presence_penalty
        scores[token] -= params.frequency_penalty * list(output).count(token)
    return scores


def distribution(scores: Sequence[float], params: SamplingParams) -> list[float]:
    """Probability of each token after temperature and filters."""
    best = max(scores)
    weights = [math.exp((score - best) / params.temperature) for score in scores]
    order = sorted(range(len(weights)), key=lambda token: -weights[token])
    least = 0.0
    if params.top_k:
        least = weights[order[min(params.top_k, len(order)) - 1]]
    if params.top_p < 1:
        kept = [token for token in order if weights[token] >= least]
        total, mass = sum(weights[token] for token in kept), 0.0
        for token in kept:
            mass += weights[token]
            if mass >= params.top_p * total:
                least = max(least, weights[token])
                break
    least = max(least, params.min_p)  # the best weight is 1
    weights = [weight if weight >= least else 0.0 for weight in weights]
    return [weight / sum(weights) for weight in weights]


def invert(probabilities: Sequence[float], random: float) -> tuple[int, float]:
    """The drawn token, and how far `random` is from where another one would be drawn."""
    mass, token = 0.0, 0
    nearest = 1.0
    for at, probability in enumerate(probabilities):
        if mass <= random and probability > 0:
            token = at
        nearest = min(nearest, abs(mass - random)) if at else nearest
        mass += probability
    return token, nearest


def is_borderline(
    scores: Sequence[float], params: SamplingParams, random: float, margin: float = 1e-5
) -> bool:
    """Whether rounding may decide the token: `random` is near a border between two tokens, or the
    mass of the likeliest tokens near top-p, or a token's weight near min-p."""
    values = np.array(scores, np.float32)
    weights = np.exp(((values - values.max()) / np.float32(params.temperature)).astype(np.float64))
    if params.min_p > 0 and (np.abs(weights / params.min_p - 1) < margin).any():
        return True
    if params.top_p < 1:
        kept = np.sort(weights)[::-1]
        if params.top_k:
            kept = kept[kept >= kept[min(params.top_k, len(kept)) - 1]]
        mass = np.cumsum(kept) / kept.sum()
        if (np.abs(mass - params.top_p) < margin).any():
            return True
    _, nearest = invert(distribution(scores, params), random)
    return nearest < margin


def is_likely(observed: NDArray[np.int64], expected: NDArray[np.float64]) -> bool:
    """Pearson's chi-square of draws, within five standard deviations; rare tokens count as one."""
    common = expected >= 5
    rest = (observed[~common].sum(), expected[~common].sum())
    pairs = [
        *zip(observed[common], expected[common], strict=True),
        *([rest] if rest[1] > 0 else []),
    ]
    chi_square = sum((o - e) ** 2 / e for o, e in pairs)
    freedom = len(pairs) - 1
    assert freedom >= 3
    return bool(chi_square < freedom + 5 * math.sqrt(2 * freedom))
