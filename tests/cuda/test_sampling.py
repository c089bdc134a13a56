"""The GPU sampler, by Triton's interpreter, against the host's and against its own statistics."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as with_fields

from tests.support.device_sampling import sample_by_stages, sampling_arrays, stage_work
from tests.support.masks import drawn_masks, masks_of
from tests.support.sampling_oracle import (
    Case,
    Float32s,
    cases,
    counts_of,
    distribution,
    edited,
    is_borderline,
    is_likely,
    is_penalised,
    params_strategy,
    with_last_pending,
)
from tests.support.triton_kernels import interpret_work, needs_triton
from trtc.plugins.sampling.tensors import EDIT, TAKE_SAMPLED
from trtc.protos.sampling import SamplingParams
from trtc.runtime.sampling.pending import with_pending_counted
from trtc.runtime.sampling.philox import uniforms
from trtc.runtime.sampling.sampler import NO_PENDING, SamplingBatch, sample

needs_triton()

GREEDY = SamplingParams(temperature=0.0)
LARGE_VOCAB = 20_003  # more blocks than a threshold's candidates


def drawn(logits: Float32s, batch: SamplingBatch) -> list[int]:
    return list(sample_by_stages(logits, batch)["sampled"][:, 0].tolist())


@settings(max_examples=25)
@given(case=cases([10, 128, 129, 700, LARGE_VOCAB]))
def test_tokens_are_those_of_the_host(case: Case) -> None:
    batch = case.batch
    expected = sample(case.logits, batch).token_ids.tolist()
    random = uniforms(batch.seed, batch.sequence, batch.position)
    for row, token in enumerate(drawn(case.logits, batch)):
        if token != expected[row]:
            assert case.params[row].temperature > 0
            assert is_borderline(case.scores(row), case.params[row], float(random[row]))


NARROW = (
    SamplingParams(top_k=1),
    SamplingParams(top_k=2),
    SamplingParams(top_k=40, temperature=2.0),
    SamplingParams(top_k=30, top_p=0.6),
    SamplingParams(top_p=0.3),
    SamplingParams(top_p=0.7, min_p=0.02),
    SamplingParams(presence_penalty=-1.9, frequency_penalty=1.5, repetition_penalty=0.8),
)
WIDE = (
    SamplingParams(top_k=10_000),
    SamplingParams(top_k=3_000, top_p=0.9),
    SamplingParams(top_p=0.999, temperature=3.0),
    SamplingParams(top_p=0.5, min_p=0.3),
    SamplingParams(min_p=1e-3, temperature=0.5),
    SamplingParams(top_k=19_999, temperature=1e-3),
)
"""More tokens stay than a row's candidates hold, if its logits are near each other."""


@pytest.mark.parametrize(
    ("params", "spread"), [*((one, 3.0) for one in NARROW), *((one, 0.7) for one in WIDE)]
)
def test_draws_from_long_rows_are_the_host_s(params: SamplingParams, spread: float) -> None:
    rng = np.random.default_rng(8)
    logits = (rng.normal(size=(5, LARGE_VOCAB)) * spread).astype(np.float32)
    seen = ([5, 6], [int(token) for row in logits for token in np.argsort(row)[-2:]] * 2)
    counts = {row: counts_of(*seen) for row in range(5)} if is_penalised(params) else {}
    batch = SamplingBatch.of([with_fields(params, seed=row) for row in range(5)], counts=counts)
    expected = sample(logits, batch).token_ids.tolist()
    random = uniforms(batch.seed, batch.sequence, batch.position)
    for row, token in enumerate(drawn(logits, batch)):
        if token != expected[row]:
            scores = edited(logits[row], params, *(seen if counts else ([], [])))
            assert is_borderline(scores, params, float(random[row]))


@pytest.mark.parametrize("params", [SamplingParams(top_k=5), SamplingParams(top_p=0.3)])
@pytest.mark.parametrize("vocab", [300, LARGE_VOCAB])
def test_ties_at_a_threshold_all_stay(params: SamplingParams, vocab: int) -> None:
    """Even if the whole row is one tie, which no candidates hold."""
    logits = np.zeros((3, vocab), np.float32)
    batch = SamplingBatch.of([with_fields(params, seed=row) for row in range(3)])
    assert drawn(logits, batch) == sample(logits, batch).token_ids.tolist()


def test_drawn_tokens_follow_the_distribution() -> None:
    """Pearson's chi-square over the draws of one row's distribution."""
    number, vocab, params = 250, 150, SamplingParams(seed=11)
    row = (np.random.default_rng(0).normal(size=vocab) * 3).astype(np.float32)
    batch = SamplingBatch.of([params] * number, position=list(range(number)))
    expected = np.array(distribution(edited(row, params, [], []), params)) * number
    observed = np.bincount(drawn(np.tile(row, (number, 1)), batch), minlength=vocab)
    assert is_likely(observed, expected)


def test_greedy_takes_the_first_of_equals() -> None:
    logits = np.full((5, 700), -3.0, np.float32)
    logits[0, [5, 600]] = 2.0
    logits[1, [130, 129]] = 2.0
    logits[2, [699]] = 2.0
    logits[3] = -0.0
    logits[3, 300] = 0.0
    logits[4, :100] = -np.inf
    assert drawn(logits, SamplingBatch.greedy(5)) == [5, 129, 699, 0, 100]


@pytest.mark.parametrize("temperature", [1e-30, 1e-42])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = np.random.default_rng(2).normal(size=(4, 700)).astype(np.float32)
    params = SamplingParams(temperature=temperature, seed=3)
    for one in (params, with_fields(params, top_p=0.9), with_fields(params, min_p=0.5, top_k=3)):
        batch = SamplingBatch.of([one] * 4)
        assert drawn(logits, batch) == logits.argmax(axis=1).tolist()


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(), SamplingParams(top_p=0.5)])
def test_rows_with_minus_infinity_never_draw_it(params: SamplingParams) -> None:
    logits = np.full((30, 400), -np.inf, np.float32)
    logits[:, [3, 317]] = 1.0
    batch = SamplingBatch.of([with_fields(params, seed=row) for row in range(30)])
    outputs = sample_by_stages(logits, batch)
    assert set(outputs["sampled"].reshape(-1).tolist()) <= {3, 317}
    assert not outputs["invalid"].any()


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=1), SamplingParams(top_k=3)])
def test_rows_without_a_finite_best_are_reported(params: SamplingParams) -> None:
    logits = np.zeros((5, 200), np.float32)
    logits[0, 7] = np.nan
    logits[1, 177] = -np.nan
    logits[3] = -np.inf
    logits[4, 1] = np.inf
    outputs = sample_by_stages(logits, SamplingBatch.of([params] * 5))
    assert outputs["invalid"][:, 0].tolist() == [1, 1, 0, 1, 1]
    assert (outputs["sampled"] < 200).all()


def test_every_bias_and_penalty_is_applied() -> None:
    rng = np.random.default_rng(5)
    rows, vocab = 5, 3000
    logits = rng.normal(size=(rows, vocab)).astype(np.float32) * 4
    params = [
        SamplingParams(repetition_penalty=1.3),
        SamplingParams(presence_penalty=0.7, logit_bias={7: 3.0, 2999: -100.0}),
        SamplingParams(),
        SamplingParams(frequency_penalty=-0.4, repetition_penalty=0.9, presence_penalty=1.0),
        SamplingParams(logit_bias={token: token / 100 for token in range(0, vocab, 2)}),
    ]
    seen = {row: (list(range(5, 2000)), rng.integers(0, 60, 90).tolist()) for row in (0, 1, 3)}
    counts = {row: counts_of(*tokens) for row, tokens in seen.items()}
    arrays = sampling_arrays(logits, SamplingBatch.of(params, counts=counts))
    after = interpret_work(stage_work(EDIT, arrays))
    for row, one in enumerate(params):
        expected = edited(logits[row], one, *seen.get(row, ([], [])))
        assert after["logits"][row] == pytest.approx(expected, rel=1e-6, abs=1e-5)


def test_masked_tokens_are_never_drawn() -> None:
    """As with `min_tokens`; a whole block of logits and more may be masked."""
    logits = np.random.default_rng(6).normal(size=(4, 700)).astype(np.float32)
    logits[:, [5, 130, 131]] = 50.0
    never = dict.fromkeys([5, *range(128, 384)], -math.inf)
    params = [
        SamplingParams(temperature=0.0, logit_bias=never),
        SamplingParams(seed=1, logit_bias=never),
        SamplingParams(seed=2, top_p=0.9, temperature=5.0, logit_bias=never),
        SamplingParams(seed=3, top_k=300, repetition_penalty=1.3, logit_bias=never),
    ]
    counts = {3: counts_of([5, 130, 7], [130])}
    batch = SamplingBatch.of(params, counts=counts, num_logprobs=[2] * 4)
    outputs = sample_by_stages(logits, batch)
    assert not outputs["invalid"].any()
    assert outputs["sampled"][:, 0].tolist() == sample(logits, batch).token_ids.tolist()
    assert not set(outputs["sampled"][:, 0].tolist()) & never.keys()
    assert set(outputs["top_ids"][:, 0].tolist()) <= {5, 130, 131}, "those of the raw logits"


def test_a_known_token_is_drawn_for_its_logprob() -> None:
    """As with `prompt_logprobs`: by a bias, beside rows that draw."""
    logits = np.random.default_rng(7).normal(size=(3, 400)).astype(np.float32) * 5
    known = {0: 399, 2: int(logits[2].argmin())}
    params = [
        SamplingParams(temperature=0.0, logit_bias={399: 3e38}),
        SamplingParams(seed=4, top_p=0.8, logit_bias={7: 2.0}),
        SamplingParams(temperature=0.0, logit_bias={known[2]: 3e38}),
    ]
    batch = SamplingBatch.of(params, num_logprobs=[1, None, 0])
    outputs = sample_by_stages(logits, batch)
    assert not outputs["invalid"].any()
    assert outputs["sampled"][:, 0].tolist() == sample(logits, batch).token_ids.tolist()
    for row, token in known.items():
        wide = logits[row].astype(np.float64)
        expected = wide[token] - np.log(np.exp(wide).sum())
        assert outputs["sampled"][row, 0] == token
        assert outputs["token_logprobs"][row, 0] == pytest.approx(expected, abs=1e-4)


@settings(max_examples=12)
@given(case=cases([10, 32, 129, 700, LARGE_VOCAB]), seed=st.integers(0, 2**32 - 1))
def test_tokens_under_masks_are_those_of_the_host(case: Case, seed: int) -> None:
    allowed, masks = drawn_masks(case.logits.shape, seed)
    batch = with_fields(case.batch, masks=masks)
    outputs = sample_by_stages(case.logits, batch)
    expected = sample(case.logits, batch).token_ids.tolist()
    random = uniforms(batch.seed, batch.sequence, batch.position)
    assert not outputs["invalid"].any()
    for row, token in enumerate(outputs["sampled"][:, 0].tolist()):
        assert allowed[row, token]
        if token != expected[row]:
            scores = np.where(allowed[row], case.scores(row), -math.inf).tolist()
            assert case.params[row].temperature > 0
            assert is_borderline(scores, case.params[row], float(random[row]))


def test_log_probabilities_are_those_among_the_tokens_that_a_mask_leaves() -> None:
    """Of the likeliest tokens, of which a row asks for more than there are, and of the drawn one,
    whose logit is edited."""
    rng = np.random.default_rng(12)
    logits = rng.normal(size=(4, 900)).astype(np.float32) * 4
    allowed = rng.random(logits.shape) < 0.1
    allowed[np.arange(4), logits.argmax(axis=1)] = False
    allowed[0, 2:] = False
    allowed[0, :2] = True
    params = [
        GREEDY,
        SamplingParams(seed=1, repetition_penalty=1.4, logit_bias={7: 3.0}),
        SamplingParams(seed=2, top_p=0.8),
        GREEDY,
    ]
    counts = {1: counts_of(list(range(900)), [5, 5])}
    batch = SamplingBatch.of(params, num_logprobs=[7, 3, None, 20], counts=counts)
    batch = with_fields(batch, masks=masks_of(allowed, [0, 1, 2]))
    expected = sample(logits, batch)
    assert expected.logprobs is not None
    assert expected.logprobs.num_top.tolist() == [2, 3, 20]
    outputs = sample_by_stages(logits, batch)
    assert outputs["sampled"][:, 0].tolist() == expected.token_ids.tolist()
    for at, row in enumerate(expected.logprobs.rows.tolist()):
        number = int(expected.logprobs.num_top[at])
        found = outputs["top_logprobs"][row, :number]
        token = outputs["token_logprobs"][row, 0]
        assert token == pytest.approx(expected.logprobs.token[at], abs=1e-4)
        top_ids = expected.logprobs.top_ids[at, :number]
        assert outputs["top_ids"][row, :number].tolist() == top_ids.tolist()
        assert found == pytest.approx(expected.logprobs.top[at, :number], abs=1e-4)


def test_rows_are_invalid_under_masks_where_the_host_says_so() -> None:
    logits = np.zeros((5, 70), np.float32)
    logits[0, 7], logits[1, 69] = np.nan, np.inf
    logits[2, 3:5] = -np.inf
    allowed = np.zeros(logits.shape, np.bool_)
    allowed[:, 3:5] = True
    batch = with_fields(SamplingBatch.of([GREEDY] * 5), masks=masks_of(allowed, [0, 1, 2, 3]))
    outputs = sample_by_stages(logits, batch)
    invalid = tuple(np.flatnonzero(outputs["invalid"]).tolist())
    assert invalid == sample(logits, batch).invalid_rows == (0, 1, 2)
    assert outputs["sampled"][3:, 0].tolist() == [3, 0]


@settings(max_examples=15)
@given(case=cases([10, 129, 300]), seed=st.integers(0, 2**32 - 1))
def test_pending_tokens_are_penalised_as_if_the_host_knew_them(case: Case, seed: int) -> None:
    """Bit for bit: new ones, and those that the sequence has seen already."""
    params = tuple(
        with_fields(one, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0) for one in case.params
    )
    batch, sampled = with_last_pending(replace(case, params=params), seed)
    batch = with_fields(batch, num_logprobs=np.full(len(params), 3, np.int32))
    found = sample_by_stages(case.logits, batch, sampled=sampled)
    expected = sample_by_stages(case.logits, with_pending_counted(batch, sampled))
    for name in ("logits", "sampled", "invalid", "token_logprobs"):
        assert found[name].tobytes() == expected[name].tobytes(), name


def test_a_pending_token_s_logprob_is_that_before_its_penalty() -> None:
    logits = np.random.default_rng(3).normal(size=(3, 300)).astype(np.float32)
    logits[:, 200] = 9.0
    params = [SamplingParams(temperature=0.0, repetition_penalty=1.1, logit_bias={4: 1.0})] * 3
    counts = {0: counts_of([5, 6], []), 1: counts_of([5, 200], []), 2: counts_of([200], [200])}
    batch = SamplingBatch.of(params, counts=counts, num_logprobs=[0] * 3)
    batch = with_fields(batch, pending=np.array([1, 0, NO_PENDING], np.int32))
    outputs = sample_by_stages(logits, batch, sampled=np.array([200, 200, 7], np.int32))
    expected = sample(logits, with_fields(batch, pending=None))
    assert expected.logprobs is not None
    assert outputs["sampled"][:, 0].tolist() == expected.token_ids.tolist() == [200] * 3
    assert outputs["token_logprobs"][:, 0] == pytest.approx(expected.logprobs.token, abs=1e-4)


def test_extreme_penalties_make_no_row_invalid() -> None:
    logits = np.array([[3e38, -3e38, 1.0, 0.5]] * 2, np.float32)
    params = [SamplingParams(temperature=0.0, repetition_penalty=at) for at in (1e-9, 1e9)]
    counts = {row: counts_of([0, 1], [1]) for row in range(2)}
    outputs = sample_by_stages(logits, SamplingBatch.of(params, counts=counts))
    assert outputs["sampled"][:, 0].tolist() == [0, 0]
    assert not outputs["invalid"].any()


def test_logprobs_are_those_of_the_raw_logits() -> None:
    rng = np.random.default_rng(4)
    logits = (rng.normal(size=(6, 1000)) * 4).astype(np.float32)
    logits[1, 10:300] = 40.0  # more ties than a block
    logits[4, 5:] = -np.inf
    rows = [
        SamplingParams(temperature=0.3, seed=1),
        SamplingParams(temperature=0.0, logit_bias={5: 100.0}),
        SamplingParams(seed=2, top_k=1),
        GREEDY,
        SamplingParams(seed=5, repetition_penalty=1.5, logit_bias={2: 3.0}),
        SamplingParams(seed=6, frequency_penalty=1.5),
    ]
    counts = {row: counts_of([1, 2, 3], [3, 3, 4]) for row in (4, 5)}
    batch = SamplingBatch.of(rows, num_logprobs=[5, 20, None, 0, 8, 3], counts=counts)
    expected = sample(logits, batch).logprobs
    outputs = sample_by_stages(logits, batch)
    assert expected is not None
    assert outputs["sampled"][1] == 5
    for at, row in enumerate(expected.rows.tolist()):
        number = int(expected.num_top[at])
        found = outputs["top_logprobs"][row, :number]
        assert outputs["token_logprobs"][row, 0] == pytest.approx(expected.token[at], abs=1e-4)
        assert outputs["top_ids"][row, :number].tolist() == expected.top_ids[at, :number].tolist()
        assert found == pytest.approx(expected.top[at, :number], abs=1e-4)


def test_a_drawn_token_s_logprob_is_that_before_its_bias_and_penalty() -> None:
    """Wherever in lists longer than a program takes at once."""
    vocab = 3000
    logits = np.random.default_rng(5).normal(size=(4, vocab)).astype(np.float32)
    wins = {2500: 90.0} | dict.fromkeys(range(1500), 0.5)
    params = [
        SamplingParams(temperature=0.0, logit_bias=wins),
        SamplingParams(temperature=0.0, logit_bias=wins, repetition_penalty=1.5),
        SamplingParams(temperature=0.0, frequency_penalty=-2.0),
        GREEDY,
    ]
    counts = {1: counts_of(list(range(2999, 1000, -1)), [2500]), 2: counts_of([1], [2500] * 9)}
    batch = SamplingBatch.of(params, counts=counts, num_logprobs=[0] * 4)
    expected = sample(logits, batch)
    outputs = sample_by_stages(logits, batch)
    assert expected.logprobs is not None
    assert outputs["sampled"][:, 0].tolist() == expected.token_ids.tolist()
    assert outputs["sampled"][:3, 0].tolist() == [2500] * 3
    assert outputs["token_logprobs"][:, 0] == pytest.approx(expected.logprobs.token, abs=1e-4)


@settings(max_examples=6)
@given(
    rows=st.lists(params_strategy, min_size=2, max_size=8),
    data_seed=st.integers(0, 2**32 - 1),
    cut=st.data(),
)
def test_a_row_does_not_depend_on_the_others(
    rows: list[SamplingParams], data_seed: int, cut: st.DataObject
) -> None:
    rng = np.random.default_rng(data_seed)
    logits = rng.normal(size=(len(rows), 333)).astype(np.float32) * 3
    together = drawn(logits, SamplingBatch.of(rows))
    some = sorted(cut.draw(st.sets(st.integers(0, len(rows) - 1), min_size=1)))
    apart = drawn(logits[some], SamplingBatch.of([rows[row] for row in some]))
    assert apart == [together[row] for row in some]


def test_pending_token_ids_are_taken_from_the_step_before() -> None:
    arrays = sampling_arrays(np.zeros((300, 10), np.float32), SamplingBatch.greedy(300))
    rng = np.random.default_rng(9)
    arrays["sampled"][:, 0] = rng.integers(0, 10, 302)
    arrays["token_ids"][:] = 77
    arrays["token_sources"][:, 0] = np.where(rng.random(302) < 0.5, -1, rng.permutation(302))
    expected = arrays["token_ids"].copy()
    for token, source in enumerate(arrays["token_sources"][:300, 0]):
        if source >= 0:
            expected[token] = arrays["sampled"][source, 0]
    found = interpret_work(stage_work(TAKE_SAMPLED, arrays))["token_ids"]
    assert found.tolist() == expected.tolist()
