"""Where a CPU engine's step goes: time by operator, beside what the machine could do, in one run.

    python -m examples.bench.cpu_step ENGINE [ENGINE ...] [--threads 2] [--batches 1,4,16]

Every engine runs decode steps at each batch size and the steps of a prefill, in turns with the
others and with measurements of the machine: reading memory, and the dot products of AVX-512 from
registers. Medians of the turns. "weights" are the bytes of weights that the steps read over their
time; TOP/s counts two operations a weight and token.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from examples.bench.batches import decode_batch, prefill_batches
from examples.bench.peers.machine import prepare
from trtc.protos.manifest import PLAN_FILE, read_manifest
from trtc.protos.plan import Call, Plan, read_plan
from trtc.runtime.engine.session import open_session
from trtc.runtime.executors.base import Executor, StepBatch
from trtc.runtime.executors.cpu import CpuExecutor
from trtc.runtime.sampling.sampler import SamplingBatch

_MACHINE_SECONDS = 0.1
"""Of each of its figures in a turn."""
_SEARCHED_ROWS = 8
"""kSearchedRows of plugins/linear/search.hpp with AVX-512."""


@dataclass(frozen=True)
class Load:
    """Sequences of `length` tokens each, of which the last or, in a prefill, all are computed."""

    sequences: int
    length: int
    is_prefill: bool = False

    @property
    def name(self) -> str:
        count = self.sequences
        return f"prefill {count}x{self.length}" if self.is_prefill else f"decode {count}"

    @property
    def num_tokens(self) -> int:
        """Computed, of all sequences."""
        return self.sequences * (self.length if self.is_prefill else 1)

    def steps(self, executor: Executor) -> list[StepBatch]:
        """One of decodes; of a prefill as many as the engine takes."""
        if self.is_prefill:
            return prefill_batches(executor, self.sequences, self.length)
        return [decode_batch(executor, self.sequences, self.length)]


class Engine:
    """An opened engine, the plan of its step, and what has been measured of it."""

    def __init__(self, path: Path, threads: int, loads: Sequence[Load]) -> None:
        manifest = read_manifest(path)
        kv = manifest.kv
        pages = max(load.sequences * kv.pages_for(load.length) for load in loads)
        executor = open_session(
            path,
            num_threads=threads,
            num_pages=pages * len(kv.groups),
            dummy_weights=manifest.dummy_weights,
            verify=False,
        ).executor
        assert isinstance(executor, CpuExecutor), f"{path} is not a CPU engine"
        self.name = path.name
        self._executor = executor
        self.plan = read_plan(path / PLAN_FILE)
        self.steps = {load: load.steps(executor) for load in loads}
        self.whole: dict[Load, list[float]] = defaultdict(list)
        self.calls: dict[Load, list[np.ndarray]] = defaultdict(list)
        for load in loads:
            self._run(load)

    def measure(self, load: Load, seconds: float) -> None:
        """Run a load's steps for about `seconds`; then once more, call by call."""
        times = list[float]()
        while sum(times) < seconds or not times:
            begin = time.perf_counter()
            self._run(load)
            times.append(time.perf_counter() - begin)
        self.whole[load].append(statistics.median(times))
        num_calls = len(self.plan.calls)
        by_step = [self._executor.time_calls(step, num_calls) for step in self.steps[load]]
        self.calls[load].append(np.sum(by_step, axis=0))

    def _run(self, load: Load) -> None:
        for step in self.steps[load]:
            self._executor.launch(step, SamplingBatch.greedy(len(step.logit_rows))).wait()


def weight_bytes(plan: Plan, call: Call, load: Load, num_steps: int) -> int:
    """Bytes of the weights that a call reads: for logits in the last step, else in each; of two
    planes the one that is read whole where the largest logits are searched for."""
    if call.operator != "linear":
        return 0
    times = 1 if call.axes["M"] == "R" else num_steps
    searches = load.sequences <= _SEARCHED_ROWS
    weights = {weight.name: weight for weight in plan.weights}
    read = [weights[one.name] for one in call.arguments if one.kind == "weight"]
    return times * sum(
        one.bytes // (2 if one.layout == "planes" and searches else 1) for one in read
    )


def operations(call: Call, load: Load) -> int:
    if call.operator != "linear":
        return 0
    rows = load.sequences if call.axes["M"] == "R" else load.num_tokens
    return 2 * rows * int(call.attributes["N"]) * int(call.axes["K"])


def kind_of(call: Call) -> str:
    """The operator, and for a linear which."""
    if call.operator != "linear":
        return call.operator
    return f"linear {call.site.rpartition('.')[2]} {call.axes['K']}x{call.attributes['N']}"


def report(engine: Engine, load: Load) -> list[str]:
    plan, median = engine.plan, statistics.median(engine.whole[load])
    seconds = np.median(engine.calls[load], axis=0)
    by_kind: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for call, spent in zip(plan.calls, seconds, strict=True):
        sums = by_kind[kind_of(call)]
        sums[0] += spent
        sums[1] += weight_bytes(plan, call, load, len(engine.steps[load]))
        sums[2] += operations(call, load)
    bytes_read = sum(sums[1] for sums in by_kind.values())
    done = sum(sums[2] for sums in by_kind.values())
    lines = [
        f"{engine.name}, {load.name}: {median * 1e3:.2f} ms, "
        f"{load.num_tokens / median:.1f} tok/s, "
        f"weights {bytes_read / median / 1e9:.1f} GB/s, {done / median / 1e12:.3f} TOP/s"
    ]
    for name, (spent, size, ops) in sorted(by_kind.items(), key=lambda item: -item[1][0]):
        rates = f"{size / spent / 1e9:6.1f} GB/s {ops / spent / 1e12:6.3f} TOP/s" if ops else ""
        lines.append(f"    {name:<28} {spent * 1e3:9.3f} ms {rates}")
    return lines


def describe(machine: Mapping[str, Sequence[float]]) -> str:
    """What the machine could do: figures of peers/machine.py, those that the CPU has."""
    reads = machine["read_bytes_s"]
    said = [f"reads {statistics.median(reads) / 1e9:.1f} GB/s (best {max(reads) / 1e9:.1f})"]
    for name, extension in (("int8", "VNNI"), ("bf16", "BF16")):
        found = machine.get(f"{name}_ops_s")
        rate = f"{statistics.median(found) / 1e12:.2f} TOP/s" if found else "not in this CPU"
        said.append(f"{name} dot products (AVX-512 {extension}) {rate}")
    return ", ".join(said)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("engines", nargs="+", type=Path)
    parser.add_argument("--batches", default="1,4,16")
    parser.add_argument("--context", type=int, default=512, help="tokens before a decode step")
    parser.add_argument("--prefill", type=int, default=512, help="tokens of a prompt; 0: none")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.3, help="of a load's steps in a turn")
    parser.add_argument("--json", type=Path, help="where the medians are written as well")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    loads = [Load(int(batch), options.context + 1) for batch in options.batches.split(",")]
    if options.prefill:
        loads.append(Load(1, options.prefill, is_prefill=True))
    engines = [Engine(path, options.threads, loads) for path in options.engines]
    machine: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as work:
        bounds = prepare(Path(work), options.threads, Path(work, "log"), _MACHINE_SECONDS)
        for _ in range(options.turns):
            for load in loads:
                for figure, value in bounds.measure().items():
                    machine[figure].append(value)
                for engine in engines:
                    engine.measure(load, options.seconds)
    print(f"machine, {options.threads} threads: {describe(machine)}")
    for load in loads:
        for engine in engines:
            print("\n".join(report(engine, load)))
    if options.json:
        medians = {
            engine.name: {load.name: statistics.median(engine.whole[load]) for load in loads}
            for engine in engines
        }
        document = {
            "machine": {name: statistics.median(values) for name, values in machine.items()},
            "seconds": medians,
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
