"""Where a CPU engine's step goes: time by operator, beside what the machine could do, in one run.

    python -m examples.bench.cpu_step ENGINE [ENGINE ...] [--threads 2] [--batches 1,4,16]

Every engine runs decode steps at each batch size and a prefill step, in turns with the others and
with two measurements of the machine: reading memory, and `vpdpbusd` from registers. Medians of the
turns. "weights" are the bytes of weights that a step reads over its time; TOP/s counts two
operations a weight and token.
"""

import argparse
import ctypes
import json
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import trtc.plugins
from trtc.builder.targets.cxx import find_compiler
from trtc.plugins.cpu.host import runnable_isas
from trtc.plugins.cpu.isa import CXX_FLAGS, ISAS
from trtc.protos.manifest import PLAN_FILE, read_manifest
from trtc.protos.plan import Call, Plan, read_plan
from trtc.runtime.executors.base import StepBatch
from trtc.runtime.executors.cpu import CpuExecutor
from trtc.runtime.session import open_session

PLUGINS = Path(trtc.plugins.__file__).resolve().parent
_READ_BYTES = 256 << 20
_DOT_ROUNDS = 1 << 22

_MACHINE = """
#include <chrono>
#include <cstring>
#include "cpu/simd.hpp"
#include "cpu/thread_pool.hpp"

using namespace trtc::gemm;

template <class Body>
double seconds_of(Body&& body) {
  const auto begin = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Seconds to read `bytes` once with all threads.
extern "C" double read_seconds(const std::byte* data, std::int64_t bytes, int threads) {
  static volatile std::int32_t sink;
  trtc::ThreadPool pool(threads);
  pool.run([](int) {});
  return seconds_of([&] {
    pool.parallel_for(bytes / 64, 4096, [&](std::int64_t begin, std::int64_t end, int) {
      I32x16 sums[4] = {splat(-1), splat(-1), splat(-1), splat(-1)};
      for (std::int64_t i = begin; i + 4 <= end; i += 4) {
        for (int j = 0; j < 4; ++j) sums[j] = bit_and(sums[j], load_cells(data + (i + j) * 64));
      }
      std::int32_t lanes[16];
      store(lanes, bit_and(bit_and(sums[0], sums[1]), bit_and(sums[2], sums[3])));
      sink = lanes[0];
    });
  });
}

// Seconds of `rounds` times 12 int8 dot products of 16 lanes by 4 on each thread.
extern "C" double dot_seconds(std::int64_t rounds, int threads) {
  static volatile std::int32_t sink;
  trtc::ThreadPool pool(threads);
  pool.run([](int) {});
  return seconds_of([&] {
    pool.run([&](int) {
      const std::uint32_t x = 0x01020304;
      const auto cell = byte_cell(&x);
      I32x16 sums[12], w = splat(0x05060708);
#pragma GCC unroll 12
      for (int j = 0; j < 12; ++j) sums[j] = splat(j);
      for (std::int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
        for (int j = 0; j < 12; ++j) dot_u8i8(sums[j], w, cell);
      }
      std::int32_t lanes[16];
#pragma GCC unroll 12
      for (int j = 0; j < 12; ++j) {
        store(lanes, sums[j]);
        sink = lanes[0];
      }
    });
  });
}
"""


class Machine:
    """What the processor and its memory do in this very minute."""

    def __init__(self, work: Path, threads: int) -> None:
        source, library = work / "machine.cpp", work / "machine.so"
        source.write_text(_MACHINE)
        isa = ISAS[runnable_isas()[0]]
        flags = (*CXX_FLAGS, *isa.compiler_flags, "-O3", f"-I{PLUGINS}")
        subprocess.run([*find_compiler().command, *flags, source, "-o", library], check=True)
        self._library = ctypes.CDLL(str(library))
        self._library.read_seconds.restype = self._library.dot_seconds.restype = ctypes.c_double
        self._memory = np.full(_READ_BYTES + 64, 1, np.uint8)
        self._threads = threads

    def read_bytes_per_s(self) -> float:
        data = self._memory.ctypes.data
        address = ctypes.c_void_p(data + -data % 64)
        seconds = self._library.read_seconds(address, ctypes.c_int64(_READ_BYTES), self._threads)
        return _READ_BYTES / float(seconds)

    def ops_per_s(self) -> float:
        seconds = self._library.dot_seconds(ctypes.c_int64(_DOT_ROUNDS), self._threads)
        return _DOT_ROUNDS * 12 * 128 * self._threads / float(seconds)


@dataclass(frozen=True)
class Load:
    """A step of `batch` sequences with `new` tokens each, after `context` tokens."""

    batch: int
    new: int
    context: int

    @property
    def name(self) -> str:
        return f"decode {self.batch}" if self.new == 1 else f"prefill {self.batch}x{self.new}"

    def step(self, page_size: int, vocab_size: int) -> StepBatch:
        rng = np.random.default_rng(self.batch)
        length = self.context + self.new
        pages = -(-length // page_size)
        table = rng.permutation(self.batch * pages).astype(np.int32).reshape(self.batch, pages)
        positions = np.tile(np.arange(self.context, length, dtype=np.int32), self.batch)
        owner = np.repeat(np.arange(self.batch), self.new)
        slots = table[owner, positions // page_size] * page_size + positions % page_size
        query_start = np.arange(self.batch + 1, dtype=np.int32) * self.new
        return StepBatch(
            token_ids=rng.integers(0, vocab_size, len(positions), np.int32),
            positions=positions,
            slots=slots.astype(np.int32),
            query_start=query_start,
            context_lens=np.full(self.batch, length, np.int32),
            page_table=table,
            logit_rows=query_start[1:] - 1,
        )


class Engine:
    """An opened engine, the plan of its step, and what has been measured of it."""

    def __init__(self, path: Path, threads: int, loads: Sequence[Load]) -> None:
        manifest = read_manifest(path)
        page_size = manifest.kv.page_size
        pages = max(load.batch * -(-(load.context + load.new) // page_size) for load in loads)
        executor = open_session(
            path,
            num_threads=threads,
            num_pages=pages,
            dummy_weights=manifest.dummy_weights,
            verify=False,
        ).executor
        assert isinstance(executor, CpuExecutor), f"{path} is not a CPU engine"
        self.name = path.name
        self._executor = executor
        self.plan = read_plan(path / PLAN_FILE)
        self._steps = {load: load.step(page_size, executor.vocab_size) for load in loads}
        self.whole: dict[Load, list[float]] = defaultdict(list)
        self.calls: dict[Load, list[np.ndarray]] = defaultdict(list)
        for step in self._steps.values():
            executor.logits(step)

    def measure(self, load: Load, seconds: float) -> None:
        """Run a load's step for about `seconds`; then once more, call by call."""
        step, times = self._steps[load], list[float]()
        while sum(times) < seconds or not times:
            begin = time.perf_counter()
            self._executor.logits(step)
            times.append(time.perf_counter() - begin)
        self.whole[load].append(statistics.median(times))
        self.calls[load].append(self._executor.time_calls(step, len(self.plan.calls)))


def weight_bytes(plan: Plan, call: Call) -> int:
    """Bytes of the weights that a call reads whole."""
    sizes = {weight.name: weight.bytes for weight in plan.weights}
    if call.operator != "linear":
        return 0
    return sum(sizes[one.name] for one in call.arguments if one.kind == "weight")


def operations(call: Call, load: Load) -> int:
    if call.operator != "linear":
        return 0
    rows = load.batch if call.axes["M"] == "R" else load.batch * load.new
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
        sums[1] += weight_bytes(plan, call)
        sums[2] += operations(call, load)
    bytes_read = sum(sums[1] for sums in by_kind.values())
    done = sum(sums[2] for sums in by_kind.values())
    lines = [
        f"{engine.name}, {load.name}: {median * 1e3:.2f} ms, "
        f"{load.batch * load.new / median:.1f} tok/s, "
        f"weights {bytes_read / median / 1e9:.1f} GB/s, {done / median / 1e12:.3f} TOP/s"
    ]
    for name, (spent, size, ops) in sorted(by_kind.items(), key=lambda item: -item[1][0]):
        rates = f"{size / spent / 1e9:6.1f} GB/s {ops / spent / 1e12:6.3f} TOP/s" if ops else ""
        lines.append(f"    {name:<28} {spent * 1e3:9.3f} ms {rates}")
    return lines


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
    loads = [Load(int(batch), 1, options.context) for batch in options.batches.split(",")]
    if options.prefill:
        loads.append(Load(1, options.prefill, 0))
    engines = [Engine(path, options.threads, loads) for path in options.engines]
    reads, dots = list[float](), list[float]()
    with tempfile.TemporaryDirectory() as work:
        machine = Machine(Path(work), options.threads)
        for _ in range(options.turns):
            for load in loads:
                reads.append(machine.read_bytes_per_s())
                dots.append(machine.ops_per_s())
                for engine in engines:
                    engine.measure(load, options.seconds)
    read, peak = statistics.median(reads), statistics.median(dots)
    print(f"machine, {options.threads} threads: reads {read / 1e9:.1f} GB/s (best ", end="")
    print(f"{max(reads) / 1e9:.1f}), int8 dot products {peak / 1e12:.2f} TOP/s")
    for load in loads:
        for engine in engines:
            print("\n".join(report(engine, load)))
    if options.json:
        medians = {
            engine.name: {load.name: statistics.median(engine.whole[load]) for load in loads}
            for engine in engines
        }
        document = {"read_bytes_per_s": read, "ops_per_s": peak, "seconds": medians}
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
