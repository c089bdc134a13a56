"""The arrays of a step against lists written token by token, whatever the scheduler did before."""

import random
from collections import Counter
from dataclasses import fields, replace

import numpy as np
import pytest

from tests.support.driver import Driver
from trtc.runtime.executors.base import StepBatch
from trtc.runtime.executors.echo import EchoOptions
from trtc.runtime.request import GenerationRequest, SamplingParams
from trtc.runtime.sampler import SamplingBatch, SparseRows, TokenCounts
from trtc.runtime.sequence import Sequence
from trtc.runtime.step_plan import StepPlan

OPTIONS = EchoOptions(
    vocab_size=32, num_pages=14, page_size=4, max_batch_size=6, max_seq_len=40, max_num_tokens=12
)


def draw_request(number: int, rng: random.Random) -> GenerationRequest:
    params = SamplingParams(
        temperature=rng.choice((0.5, 1.0)),
        top_k=rng.choice((0, 7)),
        top_p=rng.choice((1.0, 0.9)),
        min_p=rng.choice((0.0, 0.01)),
        repetition_penalty=rng.choice((1.0, 1.2)),
        presence_penalty=rng.choice((0.0, 0.5)),
        frequency_penalty=rng.choice((0.0, 0.25)),
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
    )


def naive_batch(plan: StepPlan, page_size: int) -> StepBatch:
    columns: dict[str, list[int]] = {field.name: [] for field in fields(StepBatch)}
    columns["query_start"].append(0)
    for sequence, start, num_tokens, num_samples in plan.chunks:
        for position in range(start, start + num_tokens):
            page = sequence.pages[position // page_size]
            columns["token_ids"].append(sequence.token_ids[position])
            columns["positions"].append(position)
            columns["slots"].append(page * page_size + position % page_size)
        columns["query_start"].append(len(columns["token_ids"]))
        columns["context_lens"].append(start + num_tokens)
        columns["logit_rows"] += [len(columns["token_ids"]) - 1] * num_samples
    width = max(-(-length // page_size) for length in columns["context_lens"])
    pages = [(chunk.sequence.pages + [0] * width)[:width] for chunk in plan.chunks]
    arrays = {name: np.array(values, np.int32) for name, values in columns.items()}
    return StepBatch(**{**arrays, "page_table": np.array(pages, np.int32)})


def counts_of(sequence: Sequence) -> TokenCounts:
    output = Counter(sequence.token_ids[sequence.num_prompt :])
    seen = sorted(set(sequence.token_ids))
    return TokenCounts(
        np.array(seen, np.int32), np.array([output[token] for token in seen], np.int32)
    )


def naive_sampling(plan: StepPlan) -> SamplingBatch:
    rows = [
        (chunk.sequence, chunk.sequence.index + fork)
        for chunk in plan.chunks
        for fork in range(chunk.num_samples)
    ]
    return SamplingBatch.of(
        [sequence.request.sampling for sequence, _ in rows],
        sequence=[index for _, index in rows],
        position=[sequence.num_output for sequence, _ in rows],
        num_logprobs=[sequence.request.logprobs for sequence, _ in rows],
        counts={
            row: counts_of(sequence)
            for row, (sequence, _) in enumerate(rows)
            if sequence.request.sampling.has_penalty
        },
    )


def as_dict(sparse: SparseRows) -> dict[tuple[int, int], float]:
    triples = zip(sparse.rows, sparse.token_ids, sparse.values, strict=True)
    return {(int(row), int(token)): float(value) for row, token, value in triples}


def check_batch(built: StepBatch, naive: StepBatch, page_size: int) -> None:
    for field in fields(StepBatch):
        got, expected = getattr(built, field.name), getattr(naive, field.name)
        assert got.dtype == np.int32
        assert got.shape == expected.shape
        if field.name != "page_table":
            assert got.tolist() == expected.tolist(), field.name
    for row, length in enumerate(naive.context_lens):
        used = -(-int(length) // page_size)
        assert built.page_table[row, :used].tolist() == naive.page_table[row, :used].tolist()


def check_sampling(built: SamplingBatch, naive: SamplingBatch) -> None:
    for field in fields(SamplingBatch):
        got, expected = getattr(built, field.name), getattr(naive, field.name)
        if isinstance(got, SparseRows):
            assert as_dict(got) == as_dict(expected), field.name
        else:
            assert got.dtype == expected.dtype
            assert got.tolist() == expected.tolist(), field.name


@pytest.mark.parametrize("seed", range(3))
def test_built_steps_are_the_naive_ones(seed: int) -> None:
    rng = random.Random(seed)
    driver = Driver(replace(OPTIONS, max_num_tokens=rng.choice((4, 12, 64))))

    def watch(plan: StepPlan, batch: StepBatch, sampling: SamplingBatch) -> None:
        check_batch(batch, naive_batch(plan, OPTIONS.page_size), OPTIONS.page_size)
        check_sampling(sampling, naive_sampling(plan))

    driver.watch = watch
    for number in range(60):
        driver.submit(draw_request(number, rng))
        if rng.random() < 0.1:
            driver.abort(rng.choice([one.request.request_id for one in driver.state.waiting]))
        for _ in range(rng.randint(1, 8)):
            if driver.state.has_work:
                driver.step()
    driver.run()
    assert driver.state.counters.preemptions > 10
