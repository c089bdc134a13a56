"""The time between tokens of a sequence while another's prefix is restored from the host tier.

    python -m examples.bench.tier_itl ENGINE [--tokens 8192] [--rounds 5] [--step-target 0.17]

One sequence decodes. Prompts arrive beside it whose prefixes were evicted from a KV pool with room
for one and a half of them, with no bound on what is restored before a step and with the engine
loop's bound, by turns. Prints medians of the rounds: the median and the longest time between two
tokens, and the time to the first token of a restored prompt. The engine may have been built with
--dummy-weights.
"""

import argparse
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from trtc.protos.errors import TrtcError
from trtc.protos.manifest import read_manifest
from trtc.protos.sampling import SamplingParams
from trtc.runtime.engine.emission import Delivery
from trtc.runtime.engine.loop import EngineLoop, LoopConfig
from trtc.runtime.engine.session import open_session
from trtc.runtime.executors.base import Executor
from trtc.runtime.requests.request import GenerationRequest


class Arrivals:
    """A sink that notes when tokens come (time.perf_counter)."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.cached = 0
        """Prompt tokens of the request that were not computed."""
        self.ended = threading.Event()

    def __call__(self, delivery: Delivery) -> None:
        if isinstance(delivery, TrtcError):
            raise delivery
        self.times.append(time.perf_counter())
        if (usage := delivery[-1].usage) is not None:
            self.cached = usage.cached_prompt_tokens
            self.ended.set()

    def gaps(self, begin: float) -> list[float]:
        """Milliseconds between tokens from `begin` on."""
        times = [one for one in self.times if one >= begin]
        return [1e3 * (after - before) for before, after in pairwise(times)]


def request(name: str, prompt: Sequence[int], max_tokens: int) -> GenerationRequest:
    return GenerationRequest(
        name,
        tuple(prompt),
        SamplingParams(temperature=0.0, seed=0),
        max_tokens=max_tokens,
        ignore_eos=True,
    )


def serve(loop: EngineLoop, one: GenerationRequest) -> tuple[float, int]:
    """Seconds to the first token, and the prompt tokens that were not computed."""
    sink, begin = Arrivals(), time.perf_counter()
    loop.submit(one, sink)
    sink.ended.wait()
    return sink.times[0] - begin, sink.cached


@contextmanager
def running(executor: Executor, config: LoopConfig) -> Iterator[EngineLoop]:
    loop = EngineLoop(executor, None, config)
    loop.start()
    try:
        yield loop
    finally:
        loop.stop()


class Figures(NamedTuple):
    """Of one run, in milliseconds."""

    median: float
    """Between two tokens."""
    longest: float
    first: float
    """To the first token of a restored prompt."""
    megabytes: float
    """Restored for a prompt."""


def measure(executor: Executor, config: LoopConfig, num_tokens: int) -> Figures:
    vocabulary = executor.vocab_size
    prompts = [[(7 * at + number) % vocabulary for at in range(num_tokens)] for number in range(2)]
    with running(executor, config) as loop:
        for number, prompt in enumerate(prompts):
            serve(loop, request(f"first {number}", prompt, 1))
        decoding = Arrivals()
        most = loop.bounds.max_context - 1  # it is cancelled before
        number = loop.submit(request("decoding", [1], most), decoding)
        first, begin = list[float](), time.perf_counter()
        for at, prompt in enumerate(prompts):
            seconds, cached = serve(loop, request(f"again {at}", prompt, 1))
            assert cached > num_tokens - 64, f"only {cached} tokens were cached"
            first.append(1e3 * seconds)
        gaps = decoding.gaps(begin)
        restored = loop.stats().host_restored_bytes
        loop.cancel(number)
        decoding.ended.wait()
    return Figures(
        statistics.median(gaps), max(gaps), statistics.mean(first), restored / 1e6 / len(prompts)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("engine", type=Path)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--step-target", type=float, default=LoopConfig().step_target_s, help="seconds"
    )
    options = parser.parse_args()
    manifest = read_manifest(options.engine)
    num_pages = 3 * manifest.kv.pages_of_sequence(options.tokens) // 2
    session = open_session(
        options.engine, num_pages=num_pages, dummy_weights=manifest.dummy_weights, verify=False
    )
    host_bytes = 4 * num_pages * session.executor.kv.page_bytes
    configs = {
        "no bound": LoopConfig(kv_host_bytes=host_bytes, step_target_s=0),
        "bound": LoopConfig(kv_host_bytes=host_bytes, step_target_s=options.step_target),
    }
    found: dict[str, list[Figures]] = {name: [] for name in configs}
    for _ in range(options.rounds):
        for name, config in configs.items():
            found[name].append(measure(session.executor, config, options.tokens))
    for name, runs in found.items():
        median, longest, first, megabytes = map(statistics.median, zip(*runs, strict=True))
        print(
            f"{name}: between tokens p50 {median:.1f} ms, longest {longest:.1f} ms; first token "
            f"after {first:.0f} ms; {megabytes:.0f} MB restored a prompt"
        )
    session.close()


if __name__ == "__main__":
    main()
