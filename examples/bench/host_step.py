"""What the host does for a decode step, whatever computes it: the engine loop's own time.

    python -m examples.bench.host_step [--sequences 1,64] [--steps 500] [--kv-events]

An executor that computes nothing and returns at once takes the device's place, once as one that
runs ahead and once as one that does not. Figures are microseconds of processor time of the loop's
thread a step, the median of several runs; nothing is detokenised. To compare two versions of the
code, run both by turns.
"""

import argparse
import statistics
import threading
import time
from dataclasses import dataclass

import numpy as np

from trtc.protos.sampling import SamplingParams
from trtc.runtime.engine.emission import Delivery
from trtc.runtime.engine.loop import EngineLoop, LoopConfig
from trtc.runtime.executors.base import StepBatch
from trtc.runtime.executors.echo import EchoExecutor, EchoOptions
from trtc.runtime.requests.request import GenerationRequest
from trtc.runtime.sampling.sampler import SampledTokens, SamplingBatch

_PROMPT = (1,) * 20


@dataclass(frozen=True, eq=False)
class _Done:
    """A step that is complete (implements PendingStep)."""

    tokens: SampledTokens

    def wait(self) -> SampledTokens:
        return self.tokens


class IdleExecutor(EchoExecutor):
    """Computes nothing, and draws the same token again and again."""

    def __init__(self, num_sequences: int, num_steps: int, *, runs_ahead: bool) -> None:
        length = len(_PROMPT) + num_steps
        super().__init__(
            EchoOptions(
                num_pages=num_sequences * -(-length // EchoOptions.page_size),
                max_batch_size=num_sequences,
                max_seq_len=length,
                max_num_tokens=len(_PROMPT) * num_sequences,
            )
        )
        self._runs_ahead = runs_ahead
        self.launched_at: list[float] = []
        """Processor time of the thread that launches, seconds, of each step."""

    @property
    def runs_ahead(self) -> bool:
        return self._runs_ahead

    def launch(self, batch: StepBatch, sampling: SamplingBatch) -> _Done:
        self.launched_at.append(time.thread_time())
        return _Done(SampledTokens(np.full(len(batch.logit_rows), 7, np.int32)))


def step_microseconds(
    num_sequences: int, num_steps: int, *, runs_ahead: bool, kv_events: bool
) -> float:
    """Processor time of the loop's thread for a step that decodes every sequence."""
    executor = IdleExecutor(num_sequences, num_steps, runs_ahead=runs_ahead)
    loop = EngineLoop(executor, None, LoopConfig(kv_events=kv_events))
    has_ended = threading.Semaphore(0)

    def sink(delivery: Delivery) -> None:
        if isinstance(delivery, Exception):
            raise delivery
        if delivery[-1].usage is not None:
            has_ended.release()

    for number in range(num_sequences):
        loop.submit(
            GenerationRequest(
                request_id=str(number),
                prompt_ids=_PROMPT,
                sampling=SamplingParams(temperature=0.0),
                max_tokens=num_steps,
            ),
            sink,
        )
    loop.start()
    for _ in range(num_sequences):
        has_ended.acquire()
    loop.stop()
    decodes = executor.launched_at[2:]  # the prompts' step first, and what follows it
    return 1e6 * (decodes[-1] - decodes[0]) / (len(decodes) - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description="What the host does for a decode step.")
    parser.add_argument("--sequences", default="1,64", help="sequences at once, a comma between")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--kv-events", action="store_true", help="keep a log of what is cached")
    options = parser.parse_args()
    for number in map(int, options.sequences.split(",")):
        for runs_ahead in (False, True):
            runs = [
                step_microseconds(
                    number, options.steps, runs_ahead=runs_ahead, kv_events=options.kv_events
                )
                for _ in range(options.repeats)
            ]
            kind = "runs ahead" if runs_ahead else "step by step"
            print(f"{number:4} sequences, {kind:12} {statistics.median(runs):7.1f} us")


if __name__ == "__main__":
    main()
