"""The sampler against a slow, obvious, row by row oracle, and against its own statistics."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from numpy.typing import NDArray

from tests.support.sampling_oracle import (
    Case,
    cases,
    distribution,
    edited,
    invert,
    is_likely,
    params_strategy,
)
from trtc.protos.sampling import SamplingParams
from trtc.runtime.sampling.philox import uniforms
from trtc.runtime.sampling.sampler import Float32s, SamplingBatch, TokenCounts, sample

GREEDY = SamplingParams(temperature=0.0)


@settings(max_examples=300)
@given(case=cases([10, 128, 129, 700]))
def test_tokens_are_those_of_the_oracle(case: Case) -> None:
    before = case.logits.copy()
    tokens = sample(case.logits, case.batch).token_ids
    assert (case.logits == before).all()
    for row, params in enumerate(case.params):
        scores = case.scores(row)
        if params.temperature == 0:
            assert scores[tokens[row]] >= max(scores) - 1e-4
            continue
        probabilities = distribution(scores, params)
        random = uniforms(
            np.array([params.seed], np.uint64), np.array([0]), np.array([len(case.outputs[row])])
        )
        expected, nearest = invert(probabilities, float(random[0]))
        near_a_border = nearest < 1e-4  # there rounding may choose the neighbour
        assert tokens[row] == expected or near_a_border or probabilities[tokens[row]] == 0
        # A token that the oracle drops must tie with the threshold but for rounding.
        allowed = distribution(
            [score + 1e-4 * (at == tokens[row]) for at, score in enumerate(scores)], params
        )
        assert allowed[tokens[row]] > 0 or near_a_border


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=2.0, top_k=7),
        SamplingParams(top_p=0.8),
        SamplingParams(min_p=0.1),
        SamplingParams(temperature=1.5, top_k=12, top_p=0.9, min_p=0.02),
        SamplingParams(logit_bias={0: 2.0, 5: -100.0}),
    ],
)
def test_drawn_tokens_follow_the_distribution(params: SamplingParams) -> None:
    """Pearson's chi-square over 20,000 draws of one row's distribution."""
    number, vocab = 20_000, 300
    rng = np.random.default_rng(0)
    row = (rng.normal(size=vocab) * 2).astype(np.float32)
    batch = SamplingBatch.of([replace(params, seed=11)] * number, position=list(range(number)))
    tokens = sample(np.tile(row, (number, 1)), batch).token_ids
    expected = np.array(distribution(edited(row, params, [], []), params)) * number
    observed = np.bincount(tokens, minlength=vocab)
    assert observed[expected == 0].sum() == 0
    assert is_likely(observed, expected)


@settings(max_examples=50)
@given(
    rows=st.lists(params_strategy, min_size=2, max_size=12),
    vocab=st.sampled_from([33, 128, 1000]),
    data_seed=st.integers(0, 2**32 - 1),
    cut=st.data(),
)
def test_a_row_does_not_depend_on_the_others(
    rows: list[SamplingParams], vocab: int, data_seed: int, cut: st.DataObject
) -> None:
    rng = np.random.default_rng(data_seed)
    logits = rng.normal(size=(len(rows), vocab)).astype(np.float32) * 3
    asked = [row % 4 or None for row in range(len(rows))]
    together = sample(logits, SamplingBatch.of(rows, num_logprobs=asked))
    some = sorted(cut.draw(st.sets(st.integers(0, len(rows) - 1), min_size=1)))
    apart = sample(
        logits[some],
        SamplingBatch.of([rows[row] for row in some], num_logprobs=[asked[row] for row in some]),
    )
    assert apart.token_ids.tolist() == together.token_ids[some].tolist()
    if apart.logprobs is not None and together.logprobs is not None:
        for at, row in enumerate(apart.logprobs.rows.tolist()):
            same = together.logprobs.rows.tolist().index(some[row])
            number = int(apart.logprobs.num_top[at])
            assert apart.logprobs.token[at] == together.logprobs.token[same]
            assert (apart.logprobs.top[at, :number] == together.logprobs.top[same, :number]).all()


def test_many_rows_are_drawn_in_chunks_as_they_are_alone() -> None:
    vocab = 70_000
    logits = np.random.default_rng(1).normal(size=(40, vocab)).astype(np.float32)
    rows = [SamplingParams(seed=row, top_p=0.3 + row / 100) for row in range(40)]
    together = sample(logits, SamplingBatch.of(rows)).token_ids.tolist()
    alone = [
        int(sample(logits[row : row + 1], SamplingBatch.of([rows[row]])).token_ids[0])
        for row in range(0, 40, 7)
    ]
    assert alone == together[::7]


def test_the_seed_the_sequence_and_the_position_each_change_the_draw() -> None:
    logits = np.zeros((64, 500), np.float32)

    def draws(seed: int, sequence: int, first: int) -> list[int]:
        batch = SamplingBatch.of(
            [SamplingParams(seed=seed)] * 64,
            sequence=[sequence] * 64,
            position=list(range(first, first + 64)),
        )
        return list(sample(logits, batch).token_ids.tolist())

    base = draws(1, 0, 0)
    assert draws(1, 0, 0) == base
    assert draws(1, 0, 1)[:-1] == base[1:]
    for other in (draws(2, 0, 0), draws(1, 1, 0), draws(1, 0, 64)):
        assert sum(a == b for a, b in zip(base, other, strict=True)) < 8


def test_ties_at_a_threshold_all_stay() -> None:
    logits = np.array([[3.0, 1.0, 3.0, 3.0, 0.0]], np.float32).repeat(2000, 0)
    batch = SamplingBatch.of([SamplingParams(top_k=2, seed=1)] * 2000, position=list(range(2000)))
    assert set(sample(logits, batch).token_ids.tolist()) == {0, 2, 3}


def test_greedy_takes_the_first_of_equals_and_needs_no_seed() -> None:
    logits = np.array([[1.0, 5.0, 5.0], [7.0, 5.0, 7.0]], np.float32)
    assert sample(logits, SamplingBatch.greedy(2)).token_ids.tolist() == [1, 0]


def test_a_tiny_temperature_is_greedy() -> None:
    logits = np.random.default_rng(2).normal(size=(8, 100)).astype(np.float32)
    batch = SamplingBatch.of([SamplingParams(temperature=1e-30, seed=3)] * 8)
    assert sample(logits, batch).token_ids.tolist() == logits.argmax(axis=1).tolist()


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=1), SamplingParams(top_p=0.5)])
def test_rows_with_minus_infinity_never_draw_it(params: SamplingParams) -> None:
    logits = np.full((500, 40), -np.inf, np.float32)
    logits[:, [3, 17]] = 1.0
    batch = SamplingBatch.of([params] * 500, position=list(range(500)))
    result = sample(logits, batch)
    assert set(result.token_ids.tolist()) <= {3, 17}
    assert result.invalid_rows == ()


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=1, top_k=3)])
def test_rows_without_a_finite_best_are_reported(params: SamplingParams) -> None:
    logits = np.zeros((4, 10), np.float32)
    logits[0, 7] = np.nan
    logits[2] = -np.inf
    logits[3, 1] = np.inf
    assert sample(logits, SamplingBatch.of([params] * 4)).invalid_rows == (0, 2, 3)


def log_softmax(logits: Float32s) -> NDArray[np.float64]:
    wide = logits.astype(np.float64)
    best = wide.max()
    normal: NDArray[np.float64] = wide - best - np.log(np.exp(wide - best).sum())
    return normal


def test_logprobs_are_those_of_the_raw_logits() -> None:
    rng = np.random.default_rng(4)
    logits = (rng.normal(size=(4, 1000)) * 4).astype(np.float32)
    logits[1, 10:20] = 40.0  # ten ties
    rows = [
        SamplingParams(temperature=0.3, seed=1),
        SamplingParams(temperature=0.0, logit_bias={5: 100.0}),
        SamplingParams(seed=2, top_k=1),
        GREEDY,
    ]
    result = sample(logits, SamplingBatch.of(rows, num_logprobs=[5, 3, None, 0]))
    assert result.logprobs is not None
    assert result.token_ids[1] == 5
    assert result.logprobs.rows.tolist() == [0, 1, 3]
    assert result.logprobs.num_top.tolist() == [5, 3, 0]
    for at, row in enumerate(result.logprobs.rows.tolist()):
        expected = log_softmax(logits[row])
        assert result.logprobs.token[at] == pytest.approx(expected[result.token_ids[row]], abs=1e-4)
        number = int(result.logprobs.num_top[at])
        likeliest = np.argsort(-expected, kind="stable")[:number]
        assert result.logprobs.top_ids[at, :number].tolist() == likeliest.tolist()
        assert result.logprobs.top[at, :number] == pytest.approx(expected[likeliest], abs=1e-4)


def test_what_looks_at_more_than_the_largest_logit() -> None:
    plain = SamplingParams(temperature=0.0)
    assert SamplingBatch.of([plain, plain]).only_largest
    for other in (
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=0.0, logit_bias={3: 1.0}),
    ):
        assert not SamplingBatch.of([plain, other]).only_largest
    assert not SamplingBatch.of([plain], num_logprobs=[0]).only_largest
    seen = TokenCounts(np.array([1], np.int32), np.array([2], np.int32))
    assert not SamplingBatch.of([plain], counts={0: seen}).only_largest


def test_nobody_asked_for_logprobs() -> None:
    assert sample(np.zeros((2, 5), np.float32), SamplingBatch.greedy(2)).logprobs is None
