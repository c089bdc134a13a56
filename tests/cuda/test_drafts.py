"""Drafts on a CUDA engine: rows of their own in the kernels for decodes, and the same answers."""

import functools
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cuda.test_engine import FAMILIES
from tests.support.cuda_engines import lower_dummy
from tests.support.drafts import Replaying
from tests.support.loops import Loop
from tests.support.masks import SomeTokens
from tests.support.models import VOCAB_SIZE, random_prompt
from tests.support.triton_kernels import in_interpreter, needs_triton
from trtc.protos.sampling import SamplingParams
from trtc.quant.scheme import SCHEMES
from trtc.runtime.engine.drafting import DraftConfig
from trtc.runtime.engine.loop import LoopConfig
from trtc.runtime.executors.base import PendingStep, StepBatch
from trtc.runtime.executors.cuda.buckets import Bucket
from trtc.runtime.executors.cuda.executor import CudaExecutor
from trtc.runtime.requests.completion import Completion
from trtc.runtime.requests.request import GenerationRequest
from trtc.runtime.sampling.sampler import SamplingBatch
from trtc.runtime.scheduling.pace import Pace
from trtc.runtime.scheduling.scheduler import StepLimits

needs_triton()

REQUESTS = tuple(
    GenerationRequest(
        request_id=f"r{number}",
        prompt_ids=tuple(random_prompt(length, seed=number)),
        sampling=SamplingParams(temperature=temperature, seed=number),
        max_tokens=max_tokens,
        logprobs=logprobs,
        masks=masks,
    )
    for number, (length, max_tokens, temperature, logprobs, masks) in enumerate(
        (
            (5, 12, 0.0, 2, None),
            (9, 7, 0.9, None, None),
            (40, 3, 0.0, None, None),
            (7, 9, 0.9, 1, SomeTokens(VOCAB_SIZE)),
        )
    )
)
"""The third prompt is computed in several steps, of which some check drafts as well."""


def answers(executor: CudaExecutor, before: Items[Completion] = ()) -> tuple[list[Completion], Any]:
    """What the requests are told, and the loop's counters; with drafts if answers are known."""
    loop = Loop(executor, None, LoopConfig(drafts=DraftConfig() if before else None))
    loop._pace = Pace(StepLimits(16), target_s=0)
    if before:
        loop._pipeline._drafter = Replaying([one.token_ids for one in before], executor.vocab_size)
    inboxes = [loop.send(request) for request in REQUESTS]
    loop.start()
    told = [inbox.result().completions[0] for inbox in inboxes]
    loop.stop()
    loop.check_integrity()
    return told, loop.stats()


def with_and_without(family: str, directory: str, **options: Any) -> dict[str, Any]:
    executor = lower_dummy(family, SCHEMES["fp32"], Path(directory), **options).executor
    plain, steps = answers(executor)
    kinds: set[str] = set()
    launch, draw = executor.launch, executor.draw

    def noted(batch: StepBatch, sampling: SamplingBatch) -> PendingStep:
        if sampling.drafts is not None:
            kinds.add(executor.bucket_of(batch).kind)
        return launch(batch, sampling)

    def noted_late(bucket: Bucket, sampling: SamplingBatch) -> PendingStep:
        assert sampling.masks is not None
        if sampling.drafts is not None:
            kinds.add(bucket.kind)
        return draw(bucket, sampling)

    executor.launch = noted  # type: ignore[method-assign]
    executor.draw = noted_late  # type: ignore[method-assign]
    drafted, drafted_steps = answers(executor, plain)
    return {
        "plain": plain,
        "drafted": drafted,
        "steps": (steps.steps, drafted_steps.steps),
        "accepted": (drafted_steps.accepted_draft_tokens, drafted_steps.draft_tokens),
        "kinds": kinds,
    }


@pytest.mark.parametrize("family", ["gemma3", "lfm2"])
def test_drafts_change_the_number_of_steps_alone(family: str, tmp_path: Path) -> None:
    """Of models with layers of full attention and of windows, or of convolutions with states."""
    work = functools.partial(with_and_without, **FAMILIES[family])
    result = in_interpreter(work, family, str(tmp_path))
    for plain, drafted in zip(result["plain"], result["drafted"], strict=True):
        assert drafted.token_ids == plain.token_ids
        assert drafted.finish_reason is plain.finish_reason
    found, expected = (
        np.array([one.logprob for one in result[name][0].logprobs]) for name in ("drafted", "plain")
    )
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert result["steps"][1] < result["steps"][0]
    assert 5 < result["accepted"][0] < result["accepted"][1]
    assert result["kinds"] == {"decode", "mixed"}
