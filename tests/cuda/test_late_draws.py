"""Steps of a CUDA engine that are drawn late, under masks: the tokens of the host's sampler."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from tests.support.cuda_engines import lower_dummy
from tests.support.loops import running_loop
from tests.support.masks import SomeTokens, masks_of
from tests.support.models import random_prompt
from tests.support.triton_kernels import in_interpreter, needs_triton
from trtc.protos.sampling import SamplingParams
from trtc.quant.scheme import SCHEMES
from trtc.runtime.engine.probe import solo_batch
from trtc.runtime.executors.base import (
    ExecutorSizes,
    Float32s,
    PendingStep,
    StepBatch,
    UndrawnStep,
)
from trtc.runtime.executors.cuda.executor import CudaExecutor
from trtc.runtime.requests.request import GenerationRequest
from trtc.runtime.sampling.pending import with_pending_counted
from trtc.runtime.sampling.sampler import (
    NO_PENDING,
    SampledTokens,
    SamplingBatch,
    TokenCounts,
    sample,
)

needs_triton()

PENALISED = SamplingParams(seed=3, top_p=0.9, repetition_penalty=1.3, frequency_penalty=0.4)


def late_draws(executor: CudaExecutor) -> list[bool]:
    """Whether steps that are drawn late draw as the host would from the same logits, and the next
    step finds their tokens; the last has more biases than the device has room for."""
    vocab, right = executor.vocab_size, []
    allowed = np.random.default_rng(1).random((3, vocab)) < 0.2
    seen = TokenCounts(np.arange(0, 90, 3, dtype=np.int32), np.arange(30, dtype=np.int32) % 4)
    everywhere = {token: -0.01 * token for token in range(vocab)}
    for params, masked in (
        ([SamplingParams(seed=1), PENALISED, SamplingParams(temperature=0.0)], (1, 2)),
        ([SamplingParams(seed=1), PENALISED, SamplingParams(temperature=0.0)], ()),
        ([replace(PENALISED, seed=row, logit_bias=everywhere) for row in range(3)], (0, 1)),
    ):
        batch = solo_batch(executor, np.array(random_prompt(9, seed=2), np.int32), 0, [2, 5, 8])
        counts = {row: seen for row, one in enumerate(params) if one.has_penalty}
        sampling = SamplingBatch.of(params, counts=counts, num_logprobs=[None, 2, 0])
        if masked:
            sampling = replace(sampling, masks=masks_of(allowed, masked))
        expected = sample(executor.logits(batch), sampling)
        # A step before, whose columns are not those of the draw.
        executor.launch(batch, SamplingBatch.greedy(3)).wait()
        pending = executor.launch_forward(batch).draw(sampling)
        following = solo_batch(executor, np.array([0], np.int32), 9, [0])
        ahead = replace(following, token_sources=np.array([2], np.int32))
        second = executor.launch(ahead, SamplingBatch.greedy(1)).wait().token_ids
        found = pending.wait()
        right.append(found.token_ids.tolist() == expected.token_ids.tolist())
        assert found.logprobs is not None and expected.logprobs is not None
        right.append(bool(np.allclose(found.logprobs.token, expected.logprobs.token, atol=1e-4)))
        known = replace(following, token_ids=expected.token_ids[2:])
        right.append(second.tolist() == executor.logits(known).argmax(axis=1).tolist())
    return right


def pending_penalties(executor: CudaExecutor) -> list[bool]:
    """Whether steps that are launched ahead count the token before on the device: in a list that
    has it, in one that has not, and on the host, where biases have no room on the device."""
    vocab, right = executor.vocab_size, []
    prompt = np.array(random_prompt(9, seed=2), np.int32)
    greedy = SamplingBatch.greedy(2)
    heavy = SamplingParams(temperature=0.0, repetition_penalty=3.0, presence_penalty=50.0)
    everywhere = {token: -0.01 * token for token in range(vocab)}
    for bias in ({}, everywhere):
        batch = solo_batch(executor, prompt, 0, [7, 8])
        drawn = executor.launch(batch, greedy).wait().token_ids
        following = solo_batch(executor, drawn[1:], 9, [0] * 4)
        expected = executor.logits(following)
        params = [replace(heavy, logit_bias=bias)] * 4
        counts = {
            row: TokenCounts(np.array(seen, np.int32), np.ones(len(seen), np.int32))
            for row, seen in enumerate(([1, 2], [1, int(drawn[1])], [3], [int(drawn[0]), 4]))
        }
        sampling = SamplingBatch.of(params, counts=counts)
        sampling = replace(sampling, pending=np.array([1, 1, NO_PENDING, 0], np.int32))
        executor.launch(batch, greedy)
        ahead = replace(following, token_sources=np.array([1], np.int32))
        found = executor.launch(ahead, sampling).wait().token_ids.tolist()
        known = sample(expected, with_pending_counted(sampling, drawn))
        right.append(found == known.token_ids.tolist())
    return right


def test_tokens_that_the_host_does_not_know_are_penalised(found: dict[str, Any]) -> None:
    assert found["pending_penalties"] == [True] * 2


def test_a_step_that_is_drawn_late_draws_what_the_host_would(found: dict[str, Any]) -> None:
    assert found["late_draws"] == [True] * 9


class HostDraws(ExecutorSizes):
    """The same engine, whose tokens the host draws, in step (implements Executor)."""

    def __init__(self, executor: CudaExecutor) -> None:
        super().__init__(executor.limits, executor.kv, executor.vocab_size, executor.num_pages)
        self._executor = executor

    runs_ahead = False
    counts_pending = False
    draft_rows = None
    moves_pages = False

    def launch(self, batch: StepBatch, sampling: SamplingBatch) -> PendingStep:
        return self.launch_forward(batch).draw(sampling)

    def launch_forward(self, batch: StepBatch) -> UndrawnStep:
        return Logits(self._executor.logits(batch))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)


@dataclass
class Logits:
    """Of a step; implements UndrawnStep."""

    logits: Float32s

    def draw(self, sampling: SamplingBatch) -> PendingStep:
        return Drawn(sample(self.logits, sampling))


@dataclass
class Drawn:
    tokens: SampledTokens

    def wait(self) -> SampledTokens:
        return self.tokens


def tokens_of(executor: Any, vocab_size: int) -> list[list[tuple[int, ...]]]:
    """What requests with and without masks and penalties, which run together, are told."""
    requests = [
        GenerationRequest(
            f"r{seed}",
            tuple(random_prompt(5 + seed, seed=seed)),
            replace(PENALISED if seed % 2 else SamplingParams(temperature=0.0), seed=seed),
            max_tokens=4 + seed,
            n=2 if seed == 3 else 1,
            logprobs=None if seed else 2,
            masks=SomeTokens(vocab_size, seed) if seed > 1 else None,
        )
        for seed in range(4)
    ]
    with running_loop(executor=executor) as loop:
        inboxes = [loop.send(request) for request in requests]
        told = [inbox.result().completions for inbox in inboxes]
    return [[one.token_ids for one in completions] for completions in told]


def by_both(executor: CudaExecutor) -> list[Any]:
    return [tokens_of(one, executor.vocab_size) for one in (HostDraws(executor), executor)]


def work(directory: str) -> dict[str, Any]:
    """All of it over one engine."""
    executor = lower_dummy("llama", SCHEMES["fp32"], Path(directory), num_hidden_layers=1).executor
    return {one.__name__: one(executor) for one in (late_draws, pending_penalties, by_both)}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return in_interpreter(work, str(tmp_path_factory.mktemp("engine")))


def test_requests_with_masks_and_penalties_are_told_what_the_host_draws(
    found: dict[str, Any],
) -> None:
    expected, told = found["by_both"]
    assert told == expected
