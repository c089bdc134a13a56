"""trtc's side of a measurement: `python -m examples.bench.peers.trtc_worker`, a Job on stdin.

Modules are imported where they are used: those that serve are no part of a cold start.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from examples.bench.peers.failures import RunFailed
from examples.bench.peers.jobs import Job, RawTrace, answer, answer_traces, read_job
from trtc.runtime.host.interpreter import quick_start

if TYPE_CHECKING:
    from trtc.runtime.bench.load import Target
    from trtc.runtime.requests.request_input import RequestInput


def first_token(job: Job) -> None:
    """Open the engine, print the first of some tokens: one alone would wait until the weights are
    hashed, as the end of every completion does."""
    with quick_start():  # as `trtc generate` does
        from trtc.runtime.frontends.local import LocalEngine

        engine = LocalEngine.open(
            job.model, num_threads=job.threads, dummy_weights=job.dummy_weights
        )
    with engine:
        generation = engine.generate(job.prompts[0], max_tokens=8, temperature=0.0, ignore_eos=True)
        answer(next(generation).token_ids)


async def generate(job: Job) -> list[RawTrace]:
    """All prompts at once, through scheduler and engine loop, without gRPC. Prompts are not cut to
    what decodes beside them would like, so that all sequences come to decode together."""
    with quick_start():  # as `trtc serve` does
        from trtc.runtime.bench.load import local_target
        from trtc.runtime.engine.config import EngineConfig
        from trtc.runtime.engine.opening import open_handle

    config = EngineConfig(
        num_threads=job.threads,
        prefix_cache=job.prefix_cache,
        step_target_s=0,
        dummy_weights=job.dummy_weights,
    )
    async with local_target(Path(job.model), config, open_handle) as target:
        await complete_all(target, [job.warmup], 2)
        return await complete_all(target, job.prompts, job.output_len)


async def complete_all(
    target: "Target", prompts: Sequence[Sequence[int]], output_len: int
) -> list[RawTrace]:
    import asyncio

    from trtc.runtime.bench.load import trace_request

    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(trace_request(target, request_input(prompt, output_len)))
            for prompt in prompts
        ]
    traces = [task.result() for task in tasks]
    for trace in traces:
        if trace.failure or trace.num_tokens != output_len:
            raise RunFailed(f"{trace.num_tokens} of {output_len} tokens {trace.failure}")
    return [RawTrace(trace.sent_at, trace.arrivals) for trace in traces]


def request_input(prompt: Sequence[int], output_len: int) -> "RequestInput":
    """A greedy request that no end-of-sequence token ends."""
    from trtc.runtime.requests.request_input import RequestInput

    return RequestInput(
        token_ids=tuple(prompt),
        sampling={"temperature": 0.0},
        max_tokens=output_len,
        ignore_eos=True,
    )


def main() -> None:
    job = read_job()
    if job.kind == "first_token":
        first_token(job)
    else:
        import asyncio

        answer_traces(asyncio.run(generate(job)))


if __name__ == "__main__":
    main()
