"""trtc's CPU engines beside llama.cpp and OpenVINO GenAI, in one run on one machine.

    python -m examples.bench.cpu_peers                  the shape of Llama-3.2-1B
    python -m examples.bench.cpu_peers --quick          a small shape, 4-bit engines, few runs
    python -m examples.bench.cpu_peers --shape lfm2-1.2b --only decode-1 decode-4 decode-16

Installs the peers with pip in an environment under --workdir, writes one checkpoint with random
weights, converts it with every runtime's own tools, and then runs the workloads in turns: each
contestant once, and again, `--repeats` times. Prints the medians, trtc's ratio to the best peer of
the same width and what is wanted of it, and writes report.json, report.md and report.svg.

A peer that cannot be installed is named with the reason. What is installed, converted and built is
kept for the next run, trtc's engines too until `--rebuild`. `--keep` adds to the runs of the last
one, so that a long comparison can be made in pieces: `--only decode-16 --repeats 1 --keep`.

Shapes that are no Llamas run in 4 bits, and trtc's engines of them have dummy weights.

ik_llama.cpp is on no package index: `--ik-llama-cpp DIR` has its sources compiled, and it decodes
beside the others.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from examples.bench.peers import ik_llama_cpp, llama_cpp, machine, openvino_genai, trtc_engine
from examples.bench.peers.checkpoint import (
    LLAMA_1B,
    SMALL,
    Shape,
    write_calibration,
    write_checkpoint,
)
from examples.bench.peers.contestants import Contestant, Figures, Setting
from examples.bench.peers.environment import PeerEnvironment
from examples.bench.peers.failures import RunFailed, Unavailable
from examples.bench.peers.llama_cpp import LlamaCpp, LlamaCppBuild
from examples.bench.peers.plot import ratio_plot
from examples.bench.peers.published import LFM2_1_2B, MOE_16, QWEN3_5_2B
from examples.bench.peers.report import Report
from examples.bench.peers.results import MACHINE, Sample, append, load, rows
from examples.bench.peers.work import Work
from trtc.protos.errors import TrtcError
from trtc.version import __version__

Measure = Callable[[Contestant, int], Figures]
"""(contestant, seed) -> one run's figures."""


def _second_start(one: Contestant, seed: int) -> Figures:
    """Other contestants' models may have driven files out of the page cache since the last one."""
    one.start(seed + 1)
    return one.start(seed)


WORKLOADS: Mapping[str, Measure] = {
    "decode-1": lambda one, seed: one.decode(1, seed),
    "decode-4": lambda one, seed: one.decode(4, seed),
    "decode-16": lambda one, seed: one.decode(16, seed),
    "start": _second_start,
    "chat": lambda one, seed: one.chat(seed, reuse=True),
    "chat-no-reuse": lambda one, seed: one.chat(seed, reuse=False),
    "streams": lambda one, seed: one.streams(seed),
}
DECODES = ("decode-1", "decode-4", "decode-16")
ALL_WIDTHS = (*DECODES, "start")
"""Workloads of the 8-bit and 16-bit engines; those of 4 bits run all."""
WORKLOADS_OF: Mapping[str, Sequence[str]] = {ik_llama_cpp.RUNTIME: DECODES}
"""Of runtimes that do not take part in all."""
DTYPES = ("int4_awq", "int8_sq", "fp8", "bf16")
"""Of Llamas."""
DUMMY_DTYPES = ("int4",)
"""Of other shapes."""
LLAMAS: Sequence[Shape] = (LLAMA_1B, SMALL)
SHAPES: Mapping[str, Shape] = {
    shape.name: shape for shape in (*LLAMAS, LFM2_1_2B, QWEN3_5_2B, MOE_16)
}


@dataclass(frozen=True)
class Plan:
    """What is asked for on the command line, complete."""

    workdir: Path
    shape: Shape
    only: Sequence[str]
    dtypes: Sequence[str]
    runtimes: Sequence[str]
    repeats: int
    threads: int
    keep: bool
    rebuild: bool
    ik_llama_cpp: Path | None
    """Its sources."""

    @property
    def directory(self) -> Path:
        """Of this shape's checkpoint, engines and results."""
        return self.workdir / self.shape.name

    @property
    def widths(self) -> set[int]:
        return {trtc_engine.BITS[dtype] for dtype in self.dtypes}

    def setting(self) -> Setting:
        return Setting(
            self.shape,
            Work(self.shape.vocab),
            self.threads,
            self.directory / "checkpoint",
            self.directory,
            self.workdir / "logs",
        )


RUNTIMES = ("trtc", "llama.cpp", "openvino")
"""And, where its sources are given, ik_llama.cpp."""


def prepare(plan: Plan) -> tuple[list[Contestant], dict[str, str], dict[str, Any]]:
    """Contestants, why others are absent, and the versions of those that are there."""
    setting = plan.setting()
    calibration = plan.directory / "calibration.jsonl" if plan.shape in LLAMAS else None
    if not setting.checkpoint.exists():
        print(f"writing {setting.checkpoint}", flush=True)
        write_checkpoint(setting.checkpoint, setting.shape)
    if calibration is not None and not calibration.exists():
        write_calibration(calibration, setting.shape)
    environment = PeerEnvironment(plan.workdir / "environment", setting.logs / "pip.log")
    build = LlamaCppBuild(plan.workdir / "llama.cpp", setting.logs / "llama_cpp.log")

    def of_width(bits: Mapping[str, int]) -> list[str]:
        return [name for name, width in bits.items() if width in plan.widths]

    makers: dict[str, Callable[[], tuple[Sequence[Contestant], dict[str, str]]]] = {
        "trtc": lambda: (
            trtc_engine.prepare(setting, calibration, list(plan.dtypes), plan.rebuild),
            {"trtc": __version__},
        ),
        "llama.cpp": lambda: (
            llama_cpp.prepare(setting, environment, build, of_width(llama_cpp.BITS)),
            llama_cpp.versions(build),
        ),
        "openvino": lambda: (
            openvino_genai.prepare(setting, environment, of_width(openvino_genai.BITS)),
            openvino_genai.versions(environment),
        ),
    }
    if (source := plan.ik_llama_cpp) is not None:
        output, log = plan.workdir / "ik_llama.cpp", setting.logs / "ik_llama_cpp.log"
        like = [LlamaCpp(setting, build, dtype) for dtype in of_width(llama_cpp.BITS)]
        makers[ik_llama_cpp.RUNTIME] = lambda: (
            ik_llama_cpp.prepare(source, output, environment, log, like),
            {ik_llama_cpp.RUNTIME: source.name},
        )
    contestants: list[Contestant] = []
    absent: dict[str, str] = {}
    versions: dict[str, Any] = {}
    for runtime in plan.runtimes:
        print(f"preparing {runtime}; logs are in {setting.logs}", flush=True)
        try:
            made, facts = makers[runtime]()
        except Unavailable as reason:
            absent[runtime] = str(reason)
            print(f"{runtime}: not installed: {reason}", flush=True)
        else:
            contestants += made
            versions |= facts
    return contestants, absent, versions


def run_all(
    plan: Plan, contestants: Sequence[Contestant], bounds: machine.Machine | None
) -> Iterator[Sample | str]:
    """Every workload by every contestant in turns; the text of a failure instead of a sample."""
    for turn in range(plan.repeats):
        seed = time.time_ns() % 2**31
        for workload in plan.only:
            if bounds is not None:
                yield _attempt(MACHINE, MACHINE, MACHINE, 0, seed, bounds.measure)
            takers = [one for one in contestants if _takes_part(one, workload)]
            shift = turn % max(1, len(takers))
            for one in [*takers[shift:], *takers[:shift]]:
                measure = partial(WORKLOADS[workload], one, seed)
                yield _attempt(workload, one.name, one.runtime, one.bits, seed, measure)


def _takes_part(one: Contestant, workload: str) -> bool:
    is_measured = one.bits == 4 or workload in ALL_WIDTHS
    return is_measured and workload in WORKLOADS_OF.get(one.runtime, WORKLOADS)


def _attempt(
    workload: str,
    name: str,
    runtime: str,
    bits: int,
    seed: int,
    measure: Callable[[], Figures],
) -> Sample | str:
    began = time.time()
    try:
        return Sample(workload, name, runtime, bits, seed, began, measure())
    except (RunFailed, OSError, TrtcError) as failure:
        return f"{name}, {workload}: {failure}"


def run(plan: Plan) -> int:
    contestants, absent, versions = prepare(plan)
    setting = plan.setting()
    try:
        bounds = machine.prepare(
            plan.workdir / "machine", plan.threads, setting.logs / "machine.log"
        )
    except Unavailable as reason:
        bounds = None
        absent["the machine's bounds"] = str(reason)
    path = plan.directory / "samples.jsonl"
    if not plan.keep:
        path.unlink(missing_ok=True)
    failures = []
    for result in run_all(plan, contestants, bounds):
        if isinstance(result, str):
            failures.append(result)
            print(f"failed: {result}", flush=True)
        else:
            append(path, result)
            said = "  ".join(f"{name} {value:.4g}" for name, value in result.figures.items())
            print(f"{result.workload:14} {result.contestant:20} {said}", flush=True)
    report = Report(
        facts={
            "date": time.strftime("%Y-%m-%d"),
            "machine": machine.facts(plan.threads),
            "versions": versions,
            "shape": vars(setting.shape),
            "work": vars(setting.work),
        },
        absent=absent,
        failures=failures,
        samples=load(path),
        read_bytes={one.name: one.read_bytes for one in contestants},
        prefill_ops_per_token=setting.shape.prefill_ops_per_token,
    )
    write_report(report, plan.directory)
    return 1 if failures else 0


def write_report(report: Report, directory: Path) -> None:
    (directory / "report.json").write_text(json.dumps(report.as_json(), indent=1) + "\n")
    (directory / "report.md").write_text(report.markdown())
    (directory / "report.svg").write_text(ratio_plot(rows(report.samples)))
    print(report.markdown())
    print(f"written: {directory}/report.json, report.md, report.svg")


def parse(arguments: Sequence[str] | None = None) -> Plan:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workdir", type=Path, default=Path("build/cpu-peers"))
    parser.add_argument("--shape", choices=SHAPES, help=f"default {LLAMA_1B.name}")
    parser.add_argument("--quick", action="store_true", help="a small shape, 4 bits, one run each")
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, default=tuple(WORKLOADS))
    parser.add_argument(
        "--dtypes",
        nargs="+",
        choices=(*DUMMY_DTYPES, *DTYPES),
        help="of trtc; peers follow by width",
    )
    parser.add_argument("--runtimes", nargs="+", choices=RUNTIMES, default=RUNTIMES)
    parser.add_argument("--repeats", type=int, help="default 3, with --quick 1")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--ik-llama-cpp",
        type=Path,
        metavar="DIR",
        help="sources of ik_llama.cpp, which is compiled and decodes beside the others",
    )
    parser.add_argument("--keep", action="store_true", help="add to the runs of the last time")
    parser.add_argument("--rebuild", action="store_true", help="trtc's engines, when trtc changed")
    options = parser.parse_args(arguments)
    repeats = options.repeats if options.repeats is not None else 1 if options.quick else 3
    for name, value in (("--repeats", repeats), ("--threads", options.threads)):
        if value < 1:
            parser.error(f"{name} is {value}; give 1 or more")
    shape = SHAPES[options.shape or (SMALL if options.quick else LLAMA_1B).name]
    dtypes = DTYPES if shape in LLAMAS else DUMMY_DTYPES
    return Plan(
        options.workdir.resolve(),
        shape,
        options.only,
        options.dtypes or (dtypes[:1] if options.quick else dtypes),
        (*options.runtimes, *([ik_llama_cpp.RUNTIME] if options.ik_llama_cpp else [])),
        repeats,
        options.threads,
        options.keep,
        options.rebuild,
        options.ik_llama_cpp and options.ik_llama_cpp.resolve(),
    )


if __name__ == "__main__":
    sys.exit(run(parse()))
