"""OpenVINO GenAI's side of a measurement, run by the Python of its environment, a Job on stdin.

Everything goes through the continuous-batching pipeline, which is what OpenVINO serves with.
"""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import openvino_genai as genai
from openvino import Tensor

from examples.bench.peers.failures import RunFailed
from examples.bench.peers.jobs import Job, RawTrace, answer, answer_traces, chat_seconds, read_job

_BLOCK = 32
"""Tokens of a KV block on CPUs."""


class Pipeline:
    """A converted model, opened with the settings that suit its job."""

    def __init__(self, job: Job) -> None:
        lengths = [len(prompt) + job.output_len for prompt in job.prompts]
        if job.kind == "chat":
            lengths = [sum(lengths)] * 2  # what is cached, and what is being said
        scheduler = genai.SchedulerConfig()
        scheduler.num_kv_blocks = sum(length // _BLOCK + 2 for length in lengths)
        scheduler.max_num_seqs = len(job.prompts)
        scheduler.dynamic_split_fuse = True
        scheduler.max_num_batched_tokens = job.step_tokens
        scheduler.enable_prefix_caching = job.prefix_cache
        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": job.threads, "NUM_STREAMS": 1}
        self._pipeline = genai.ContinuousBatchingPipeline(job.model, scheduler, "CPU", properties)
        self._number = 0

    def submit(self, prompt: Sequence[int], output_len: int) -> Any:
        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = output_len
        config.ignore_eos = True
        config.do_sample = False
        self._number += 1
        return self._pipeline.add_request(self._number, Tensor(np.array([prompt])), config)

    def step(self) -> bool:
        """One step; whether there was one to do."""
        if not self._pipeline.has_non_finished_requests():
            return False
        self._pipeline.step()
        return True

    def complete(self, prompt: Sequence[int], output_len: int) -> list[int]:
        handle = self.submit(prompt, output_len)
        ids: list[int] = []
        while self.step():
            ids += new_tokens(handle)
        return ids

    def generate(self, prompts: Sequence[Sequence[int]], output_len: int) -> list[RawTrace]:
        """All at once, as their tokens come."""
        sent_at = time.perf_counter()
        handles = [self.submit(prompt, output_len) for prompt in prompts]
        traces = [RawTrace(sent_at, []) for _ in handles]
        while self.step():
            now = time.perf_counter()
            for handle, trace in zip(handles, traces, strict=True):
                if ids := new_tokens(handle):
                    trace.arrivals.append((now, len(ids)))
        for trace in traces:
            if sum(tokens for _, tokens in trace.arrivals) != output_len:
                raise RunFailed(f"not {output_len} tokens: {trace.arrivals}")
        return traces


def new_tokens(handle: Any) -> list[int]:
    """Ids that came since the last look; of one sequence, as nothing here asks for more."""
    if not handle.can_read():
        return []
    (output,) = handle.read().values()
    return list(output.generated_ids)


def main() -> None:
    job = read_job()
    pipeline = Pipeline(job)
    if job.kind == "first_token":
        answer(pipeline.complete(job.prompts[0], 1))
        return
    pipeline.complete(job.warmup, 2)
    if job.kind == "generate":
        answer_traces(pipeline.generate(job.prompts, job.output_len))
    else:
        answer(chat_seconds(pipeline.complete, job.prompts, job.output_len))


if __name__ == "__main__":
    main()
