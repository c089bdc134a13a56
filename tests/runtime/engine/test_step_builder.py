"""The arrays of a step against lists written token by token, whatever the scheduler did before."""

import itertools
import math
import random
from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import replace

import numpy as np
import pytest
from msgspec.structs import replace as with_fields

from tests.support.drafts import Guesser
from tests.support.driver import Driver
from trtc.protos.sampling import SamplingParams
from trtc.runtime.engine.step_builder import BuiltStep, StepBuilder
from trtc.runtime.executors.base import NO_SOURCE, DraftRows, StepBatch
from trtc.runtime.executors.echo import EchoOptions
from trtc.runtime.requests.request import GenerationRequest
from trtc.runtime.sampling.masks import RowMasks
from trtc.runtime.sampling.sampler import (
    NO_DRAFT,
    NO_PENDING,
    WRONG_DRAFT,
    SamplingBatch,
    SparseRows,
    TokenCounts,
)
from trtc.runtime.scheduling.sequence import Sequence
from trtc.runtime.scheduling.step_plan import StepPlan

OPTIONS = EchoOptions(
    vocab_size=32, num_pages=14, page_size=4, max_batch_size=6, max_seq_len=40, max_num_tokens=12
)


def draw_request(number: int, rng: random.Random) -> GenerationRequest:
    penalised = rng.random() < 0.3
    params = SamplingParams(
        temperature=rng.choice((0.5, 1.0)),
        top_k=rng.choice((0, 7)),
        top_p=rng.choice((1.0, 0.9)),
        min_p=rng.choice((0.0, 0.01)),
        repetition_penalty=rng.choice((1.0, 1.2)) if penalised else 1.0,
        presence_penalty=rng.choice((0.0, 0.5)) if penalised else 0.0,
        frequency_penalty=rng.choice((0.0, 0.25)) if penalised else 0.0,
        logit_bias=rng.choice(({}, {3: 1.5, 9: -2.0})),
        seed=rng.getrandbits(64),
    )
    length = rng.randint(1, 20)
    return GenerationRequest(
        request_id=f"r{number}",
        prompt_ids=tuple(rng.choice((1, 2)) for _ in range(length)),
        sampling=params,
        max_tokens=rng.randint(1, 20),
        n=rng.choice((1, 1, 3)),
        logprobs=rng.choice((None, 0, 4)),
        stop_token_ids=rng.choice(((), (31,))),
        min_tokens=rng.choice((0, 4)),
        prompt_logprobs=rng.choice((None, None, 3)),
    )


def naive_batch(
    plan: StepPlan, page_size: int, rows: dict[Sequence, int], *, as_sequences: bool = False
) -> StepBatch:
    """
    Args:
        rows: of the launch before, for each sequence that drew a token.
        as_sequences: each draft is a sequence of its own.
    """
    owners: list[Sequence] = []
    columns: dict[str, list[int]] = {field: [] for field in StepBatch.__struct_fields__}
    columns["query_start"].append(0)
    for sequence, start, num_tokens, num_samples, num_scored, num_drafts in plan.chunks:
        columns["logit_rows"] += range(
            len(columns["token_ids"]), len(columns["token_ids"]) + num_scored + num_drafts
        )
        token_ids: list[int | None] = list(sequence.token_ids)
        if num_drafts:
            token_ids += [None] * (start + 1 - len(token_ids))  # pending
            token_ids += sequence.drafts[:num_drafts]
        for position in range(start, start + num_tokens):
            page = sequence.pages[0][position // page_size]
            token = token_ids[position] if position < len(token_ids) else None
            columns["token_ids"].append(token or 0)
            columns["token_sources"].append(rows[sequence] if token is None else NO_SOURCE)
            columns["positions"].append(position)
            columns["slots"].append(page * page_size + position % page_size)
        for behind in reversed(range(1 + num_drafts if as_sequences else 1)):
            owners.append(sequence)
            columns["query_start"].append(len(columns["token_ids"]) - behind)
            columns["context_lens"].append(start + num_tokens - behind)
        columns["logit_rows"] += [len(columns["token_ids"]) - 1] * num_samples
    width = max(-(-length // page_size) for length in columns["context_lens"])
    pages = [(sequence.pages[0] + [0] * width)[:width] for sequence in owners]
    arrays = {name: np.array(values, np.int32) for name, values in columns.items()}
    return StepBatch(**{**arrays, "page_table": np.array(pages, np.int32)})


def counts_of(sequence: Sequence) -> TokenCounts:
    output = Counter(sequence.token_ids[sequence.num_prompt :])
    seen = sorted(set(sequence.token_ids))
    return TokenCounts(
        np.array(seen, np.int32), np.array([output[token] for token in seen], np.int32)
    )


def early_sampling(request: GenerationRequest, position: int) -> SamplingParams:
    """With the tokens that would end a sequence too early masked."""
    if position >= request.min_tokens:
        return request.sampling
    bias = {**request.sampling.logit_bias, **dict.fromkeys(request.stop_token_ids, -math.inf)}
    return with_fields(request.sampling, logit_bias=bias)


def naive_sampling(plan: StepPlan, sources: dict[Sequence, int]) -> SamplingBatch:
    """`sources`: of the launch before, for each sequence with a token that is pending."""
    rows = [
        row
        for chunk in plan.chunks
        for row in (
            *((chunk.sequence, 0, chunk.start + 1 + at, True) for at in range(chunk.num_scored)),
            *(
                (chunk.sequence, chunk.sequence.index, chunk.start + 1 + at, False)
                for at in range(chunk.num_drafts)
            ),
            *(
                (chunk.sequence, chunk.sequence.index + fork, chunk.start + chunk.num_tokens, False)
                for fork in range(chunk.num_samples)
            ),
        )
    ]
    penalised = {
        row: (sequence, length)
        for row, (sequence, _, length, is_scored) in enumerate(rows)
        if sequence.request.sampling.has_penalty and not is_scored
    }
    pending = np.full(len(rows), NO_PENDING, np.int32)
    for row, (sequence, length) in penalised.items():
        if length > len(sequence.token_ids):
            assert length == len(sequence.token_ids) + 1
            pending[row] = sources[sequence]
    sampling = SamplingBatch.of(
        [
            scoring_sampling(sequence, length)
            if is_scored
            else early_sampling(sequence.request, length - sequence.num_prompt)
            for sequence, _, length, is_scored in rows
        ],
        sequence=[index for _, index, _, _ in rows],
        position=[length - sequence.num_prompt for sequence, _, length, _ in rows],
        num_logprobs=[
            sequence.request.prompt_logprobs if is_scored else sequence.request.logprobs
            for sequence, _, _, is_scored in rows
        ],
        counts={row: counts_of(sequence) for row, (sequence, _) in penalised.items()},
    )
    return with_fields(sampling, pending=pending) if (pending != NO_PENDING).any() else sampling


def scoring_sampling(sequence: Sequence, position: int) -> SamplingParams:
    """Draws the token at `position`, which is known."""
    bias = {sequence.token_ids[position]: 3e38}
    return with_fields(sequence.request.sampling, temperature=0.0, logit_bias=bias)


def as_dict(sparse: SparseRows) -> dict[tuple[int, int], float]:
    triples = zip(sparse.rows, sparse.token_ids, sparse.values, strict=True)
    return {(int(row), int(token)): float(value) for row, token, value in triples}


def check_batch(built: StepBatch, naive: StepBatch, page_size: int) -> None:
    for field in StepBatch.__struct_fields__:
        got, expected = getattr(built, field), getattr(naive, field)
        if field == "token_sources" and (expected == NO_SOURCE).all():
            assert got is None
            continue
        assert got.dtype == np.int32
        assert got.shape == expected.shape
        if field != "page_table":
            assert got.tolist() == expected.tolist(), field
    for row, length in enumerate(naive.context_lens):
        used = -(-int(length) // page_size)
        assert built.page_table[row, :used].tolist() == naive.page_table[row, :used].tolist()


def check_sampling(built: SamplingBatch, naive: SamplingBatch) -> None:
    for field in SamplingBatch.__struct_fields__:
        got, expected = getattr(built, field), getattr(naive, field)
        if field in ("masks", "drafts"):  # `check_drafts` checks those
            assert expected is None
        elif isinstance(got, SparseRows):
            assert as_dict(got) == as_dict(expected), field
        elif expected is None:
            assert got is None
        else:
            assert got.dtype == expected.dtype
            assert got.tolist() == expected.tolist(), field


def check_drafts(built: SamplingBatch, plan: StepPlan) -> None:
    drafts = [
        draft
        for chunk in plan.chunks
        for draft in (
            *[NO_DRAFT] * chunk.num_scored,
            *chunk.sequence.drafts[: chunk.num_drafts],
            *[NO_DRAFT] * chunk.num_samples,
        )
    ]
    if plan.has_drafts:
        assert built.drafts is not None
        assert built.drafts.dtype == np.int32
        assert built.drafts.tolist() == drafts
    else:
        assert built.drafts is None
        assert set(drafts) <= {NO_DRAFT}


@pytest.mark.parametrize(("ahead", "counts"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(
    ("seed", "drafts", "as_sequences"), [(0, False, False), (1, True, False), (2, True, True)]
)
def test_built_steps_are_the_naive_ones(
    seed: int,
    drafts: bool,
    as_sequences: bool,
    ahead: bool,
    counts: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = random.Random(seed)
    options = replace(
        OPTIONS,
        max_num_tokens=rng.choice((4, 12, 64)),
        accepts_at_random=True,
        counts_pending=counts,
        draft_rows=DraftRows(most=16, as_sequences=as_sequences),
    )
    driver = Driver(options, ahead=ahead, drafter=Guesser(options) if drafts else None)
    build, late_sampling = StepBuilder.build, StepBuilder.late_sampling
    rows: dict[Sequence, int] = {}
    late: dict[BuiltStep, StepPlan] = {}

    def checked_build(builder: StepBuilder, plan: StepPlan) -> BuiltStep:
        built = build(builder, plan)
        if builder is not driver.pipeline._builder:
            return built  # of a run that says what may be drafted
        naive = naive_batch(plan, OPTIONS.page_size, rows, as_sequences=as_sequences)
        check_batch(built.batch, naive, OPTIONS.page_size)
        if built.is_drawn_late:
            late[built] = plan
        else:
            check_sampling(built.sampling, naive_sampling(plan, rows))
        check_drafts(built.sampling, plan)
        rows.clear()
        numbers = [one.num_scored + one.num_drafts + one.num_samples for one in plan.chunks]
        for chunk, end in zip(plan.chunks, itertools.accumulate(numbers), strict=True):
            rows[chunk.sequence] = end - chunk.num_samples
        return built

    def checked_late(
        builder: StepBuilder,
        step: BuiltStep,
        masks: RowMasks | None,
        biases: Mapping[int, Mapping[int, float]],
        last_rows: Items[int],
    ) -> SamplingBatch:
        sampling = late_sampling(builder, step, masks, biases, last_rows)
        if step.sampling.drafts is not None:
            expected = step.sampling.drafts.copy()
            expected[list(last_rows)] = WRONG_DRAFT
            assert sampling.drafts is not None
            assert sampling.drafts.tolist() == expected.tolist()
        check_sampling(sampling, naive_sampling(late.pop(step), {}))
        return sampling

    monkeypatch.setattr(StepBuilder, "build", checked_build)
    monkeypatch.setattr(StepBuilder, "late_sampling", checked_late)
    for number in range(60):
        driver.submit(draw_request(number, rng))
        if rng.random() < 0.1 and driver.state.waiting:
            driver.abort(rng.choice([one.request.request_id for one in driver.state.waiting]))
        for _ in range(rng.randint(1, 8)):
            if driver.is_busy:
                driver.step()
    driver.run()
    assert driver.state.counters.preemptions > 5
    assert (driver.num_pending_tokens > 100) == ahead
    assert (driver.num_counted_tokens > 20) == counts
    assert not late
    assert (driver.state.counters.accepted_tokens > 10) == drafts
