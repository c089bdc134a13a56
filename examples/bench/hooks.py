"""The time between tokens with hooks that change nothing, beside none; and what a call costs.

    python -m examples.bench.hooks ENGINE --streams 1 --streams 8
    python -m examples.bench.hooks

One server a set of hooks, by turns: rounds go through all sets, so that what else the machine does
meets all of them. Prints the median of the rounds' p50, and of their ratios to a server without.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import psutil

from examples.bench.served import trtc_server
from trtc.hooks import NewOutput, Request, RequestInfo
from trtc.runtime.bench.load import ServerTarget, Shape, run_load
from trtc.runtime.bench.measure import Load
from trtc.runtime.client import AsyncClient
from trtc.runtime.hooks.calls import Edit, Edited, HookCalls
from trtc.runtime.hooks.config import HooksConfig


class WithoutLogits:
    """Every hook but logits_processor."""

    def on_request(self, request: Request) -> None:
        pass

    def on_prompt(self, request: RequestInfo, token_ids: Sequence[int]) -> None:
        pass

    def on_output(self, request: RequestInfo, output: NewOutput) -> None:
        pass


class All(WithoutLogits):
    def logits_processor(self, request: RequestInfo, output_ids: Sequence[int]) -> None:
        pass


SETS = {"none": (), "all but logits": ("WithoutLogits",), "all": ("All",)}


async def p50_ms(address: str, load: Load, shape: Shape) -> float:
    """Of the time between tokens."""
    async with AsyncClient(address) as client:
        found = await run_load(ServerTarget(client, ""), load, shape)
    assert not found.failures, found.failures
    return found.itl_ms.p50


def compare(
    engine: Path, load: Load, shape: Shape, *, rounds: int, options: Sequence[str]
) -> dict[str, list[float]]:
    """The p50 of each round, by set of hooks."""
    found: dict[str, list[float]] = {name: [] for name in SETS}
    with ExitStack() as stack:
        addresses = {}
        for name, classes in SETS.items():
            hooks = [f"--hooks=examples.bench.hooks:{one}" for one in classes]
            served = trtc_server(engine, "--log-level", "warning", *hooks, *options)
            addresses[name] = stack.enter_context(served).address
        for address in addresses.values():
            asyncio.run(p50_ms(address, load, shape))
        for _ in range(rounds):
            for name, address in addresses.items():
                found[name].append(asyncio.run(p50_ms(address, load, shape)))
    return found


INFO = RequestInfo("0" * 32, "model")
OUTPUT = NewOutput(0, " token", (5,))


async def outputs(calls: HookCalls, number: int) -> None:
    """As many calls of on_output at once."""
    await asyncio.gather(*(calls.call(0, "on_output", "r", INFO, OUTPUT) for _ in range(number)))


async def edits(calls: HookCalls, number: int, num_output: int = 64) -> None:
    """As many calls of logits_processor, of a step."""
    loop = asyncio.get_running_loop()
    answered = loop.create_future()
    num_left = number

    def settle(ended: Sequence[Edited]) -> None:
        nonlocal num_left
        num_left -= len(ended)
        if num_left == 0:  # as a step is woken by the last one
            loop.call_soon_threadsafe(answered.set_result, None)

    output_ids = list(range(num_output))
    calls.begin_edits([Edit(0, INFO, output_ids, None) for _ in range(number)], settle)
    await answered


KINDS = {"on_output": outputs, "logits_processor": edits}


async def call_cost(method: str, at_once: int, num_calls: int = 6400) -> str:
    """CPU time of a call, in the server's process and in the hooks'."""
    calls = HookCalls(HooksConfig("examples.bench.hooks:All", num_processes=1))
    await calls.start()
    process = psutil.Process(calls.pids[0])
    for _ in range(2):  # the first time to warm up
        theirs, ours = sum(process.cpu_times()[:2]), time.process_time()
        begin = time.perf_counter()
        for _ in range(num_calls // at_once):
            await KINDS[method](calls, at_once)
        wall = 1e6 * (time.perf_counter() - begin) * at_once / num_calls
        ours = 1e6 * (time.process_time() - ours) / num_calls
        theirs = 1e6 * (sum(process.cpu_times()[:2]) - theirs) / num_calls
    await calls.close()
    return (
        f"{at_once:3d} calls of {method} at once: answered after {wall:.0f} us; "
        f"each {ours:.1f} us of CPU time here, {theirs:.1f} us there"
    )


def report(streams: int, found: dict[str, list[float]]) -> None:
    for name, rounds in found.items():
        p50 = statistics.median(rounds)
        pairs = zip(rounds, found["none"], strict=True)
        ratio = statistics.median(one / base for one, base in pairs)
        spread = f"{min(rounds):.3f} to {max(rounds):.3f}"
        print(
            f"{streams:3d} streams  hooks: {name:15s} ITL p50 {p50:.3f} ms ({spread})  "
            f"{ratio:.3f}x",
            flush=True,
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engine", type=Path, nargs="?", help="without one: what a call costs")
    parser.add_argument("--streams", type=int, action="append")
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dummy-weights", action="store_true")
    parser.add_argument("--kv-bytes", type=int, help="of the pool of each of the three servers")
    given = parser.parse_args(arguments)
    if given.engine is None:
        for method in KINDS:
            for at_once in (1, 16, 64):
                print(asyncio.run(call_cost(method, at_once)))
        return
    shape = Shape(given.input_len, given.output_len)
    options = ["--dummy-weights"] if given.dummy_weights else []
    if given.kv_bytes is not None:
        options += ["--kv-bytes", str(given.kv_bytes)]
    for streams in given.streams or [1]:
        load = Load(streams, concurrency=streams)
        report(streams, compare(given.engine, load, shape, rounds=given.rounds, options=options))


if __name__ == "__main__":
    main()
