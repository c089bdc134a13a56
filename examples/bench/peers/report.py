"""The report of a run: Markdown for eyes, JSON for programs."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from examples.bench.peers.results import MACHINE, Row, Sample, medians, rows

_SCALES = {"peak_rss_bytes": 1e-6}
_NO_VALUE = "-"
_MACHINE_FIGURES = (
    ("read_bytes_s", "GB/s read", 1e-9),
    ("int8_ops_s", "int8 TOP/s", 1e-12),
    ("bf16_ops_s", "bf16 TFLOP/s", 1e-12),
)


@dataclass(frozen=True)
class Report:
    """All that a run says."""

    facts: Mapping[str, Any]
    """Machine, versions, shape, token counts, date."""
    absent: Mapping[str, str]
    """Runtime -> why it takes no part."""
    failures: Sequence[str]
    """Runs that did not end well."""
    samples: Sequence[Sample]
    read_bytes: Mapping[str, int]
    """Contestant -> bytes of weights that a decode step reads."""
    prefill_ops_per_token: int

    def as_json(self) -> dict[str, Any]:
        return {
            **self.facts,
            "not_installed": dict(self.absent),
            "failures": list(self.failures),
            "table": [
                {
                    "engine": row.engine,
                    "line": row.wanted.title,
                    "trtc": row.ours,
                    "peers": dict(row.peers),
                    "best_peer": row.best_peer,
                    "ratio": row.ratio,
                    "better": row.wanted.better,
                    "wanted_ratio": row.wanted_ratio,
                    "limit": row.wanted.limit,
                    "reached": row.reached,
                }
                for row in rows(self.samples)
            ],
            "bounds": [asdict(bound) for bound in self.bounds()],
            "medians": [
                {"workload": workload, "contestant": contestant, **figures}
                for (workload, contestant), figures in medians(self.samples).items()
            ],
            "samples": [asdict(sample) for sample in self.samples],
        }

    def bounds(self) -> list["Bound"]:
        """How near every contestant came to what the machine can do."""
        middle = medians(self.samples)
        machine = middle.get((MACHINE, MACHINE), {})
        widths = {sample.contestant: sample.bits for sample in self.samples}
        found = []
        for name, size in self.read_bytes.items():
            figures = middle.get(("decode-1", name))
            if figures is None:
                continue
            read = size * figures["decode_tok_s"]
            ops = self.prefill_ops_per_token * figures["prefill_tok_s"]
            peak = machine.get("bf16_ops_s" if widths[name] == 16 else "int8_ops_s")
            found.append(Bound(name, size, read, ops, machine.get("read_bytes_s"), peak))
        return found

    def markdown(self) -> str:
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        engines: dict[str, list[Row]] = {}
        for row in rows(self.samples):
            engines.setdefault(row.engine, []).append(row)
        for engine, table in engines.items():
            yield from ("", f"{engine}, medians", "")
            yield "| | trtc | best peer | | ratio | wanted | reached |"
            yield "|---|---|---|---|---|---|---|"
            yield from map(_row, table)
        yield from ("", "All medians", "", *_all_medians(self.samples))
        if bounds := self.bounds():
            yield from ("", "Against the machine's bounds", "", *_bounds(bounds))
        if ranges := list(_machine_ranges(self.samples)):
            yield from ("", f"The machine between the runs: {', '.join(ranges)}.")
            yield "Where these differ by much, others used it too: only ratios of neighbours count."
        for runtime, reason in self.absent.items():
            yield from ("", f"{runtime}: not installed: {reason}")
        for failure in self.failures:
            yield from ("", f"failed: {failure}")


@dataclass(frozen=True)
class Bound:
    """Decode of one sequence and prefill, beside memory and arithmetic."""

    contestant: str
    weights: int
    """Bytes of weights that a decode step reads."""
    read_bytes_s: float
    """Of weights, by decode of one sequence."""
    prefill_ops_s: float
    """Of the layers' linears."""
    machine_read_bytes_s: float | None
    machine_ops_s: float | None
    """int8 or bf16, as the width suggests; None: the CPU has no such instruction."""


def _row(row: Row) -> str:
    wanted = []
    if row.wanted_ratio is not None:
        wanted.append(f"{'>=' if row.wanted.better == 'higher' else '<='} {row.wanted_ratio:g}x")
    if row.wanted.limit is not None:
        wanted.append(f"< {row.wanted.limit:g}")
    best = row.best_peer
    cells = [
        row.wanted.title,
        _value(row.wanted.figure, row.ours),
        best or "no peer was measured",
        _value(row.wanted.figure, row.peers[best]) if best else _NO_VALUE,
        f"{row.ratio:.2f}x" if row.ratio is not None else _NO_VALUE,
        ", ".join(wanted),
        {True: "yes", False: "no", None: _NO_VALUE}[row.reached],
    ]
    return f"| {' | '.join(cells)} |"


def _all_medians(samples: Sequence[Sample]) -> Iterator[str]:
    middle = medians(samples)
    columns = list(
        dict.fromkeys(
            (workload, figure)
            for (workload, _), figures in middle.items()
            for figure in figures
            if workload != MACHINE
        )
    )
    counts: dict[tuple[str, str], int] = {}
    for sample in samples:
        key = (sample.workload, sample.contestant)
        counts[key] = counts.get(key, 0) + 1
    contestants = list(dict.fromkeys(s.contestant for s in samples if s.contestant != MACHINE))
    yield f"| workload | figure | {' | '.join(contestants)} |"
    yield f"|---|---|{'---|' * len(contestants)}"
    for workload, figure in columns:
        cells = []
        for name in contestants:
            value = middle.get((workload, name), {}).get(figure)
            runs = counts.get((workload, name))
            cells.append(_NO_VALUE if value is None else f"{_value(figure, value)} ({runs})")
        yield f"| {workload} | {figure.replace('_bytes', '_mb')} | {' | '.join(cells)} |"
    yield ""
    yield "In brackets: runs."


def _bounds(bounds: Sequence[Bound]) -> Iterator[str]:
    yield "| | weights, GB | decode reads, GB/s | of memory | prefill, TOP/s | of peak |"
    yield "|---|---|---|---|---|---|"
    for one in bounds:
        yield (
            f"| {one.contestant} | {one.weights / 1e9:.2f} | {one.read_bytes_s / 1e9:.1f} | "
            f"{_share(one.read_bytes_s, one.machine_read_bytes_s)} | "
            f"{one.prefill_ops_s / 1e12:.2f} | {_share(one.prefill_ops_s, one.machine_ops_s)} |"
        )


def _machine_ranges(samples: Sequence[Sample]) -> Iterator[str]:
    """Least, median and most of each figure: how steady the machine was."""
    series: dict[str, list[float]] = {}
    for sample in samples:
        if sample.workload == MACHINE:
            for name, value in sample.figures.items():
                series.setdefault(name, []).append(value)
    for name, title, scale in _MACHINE_FIGURES:
        if values := series.get(name):
            low, middle, high = min(values), statistics.median(values), max(values)
            yield f"{title} {middle * scale:.3g} ({low * scale:.3g} to {high * scale:.3g})"


def _share(value: float, whole: float | None) -> str:
    return _NO_VALUE if whole is None else f"{value / whole:.0%}"


def _value(figure: str, value: float) -> str:
    """Three digits that count."""
    value *= _SCALES.get(figure, 1.0)
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
