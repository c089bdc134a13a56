"""Runs, their medians, and how trtc's compare with the best peer's of the same width."""

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

OURS = "trtc"
MACHINE = "machine"


@dataclass(frozen=True)
class Sample:
    """One run of one workload by one contestant."""

    workload: str
    contestant: str
    runtime: str
    bits: int
    seed: int
    at: float
    """time.time() when it began."""
    figures: Mapping[str, float]


@dataclass(frozen=True)
class Wanted:
    """A line of the table: which figure of which workload, and what trtc aims at."""

    title: str
    workload: str
    figure: str
    better: Literal["higher", "lower"]
    ratio: float | None = None
    """Of trtc's median to the best peer's: at least this when higher is better, else at most;
    None: only `limit` counts."""
    other_widths: float | None = None
    """The same for engines of other widths than 4 bits; None: not compared there."""
    peers_workload: str | None = None
    """Where the peers do something else than trtc: their workload."""
    limit: float | None = None
    """What the figure itself must stay under, whatever the peers do."""


WANTED = (
    Wanted("decode, 1 sequence, tok/s", "decode-1", "decode_tok_s", "higher", 1.25, 1.2),
    Wanted("decode, 4 sequences, tok/s", "decode-4", "decode_tok_s", "higher", 1.6, 1.2),
    Wanted("decode, 16 sequences, tok/s", "decode-16", "decode_tok_s", "higher", 1.6, 1.2),
    Wanted("prefill, tok/s", "decode-1", "prefill_tok_s", "higher", 1.4, 1.2),
    Wanted("process start to first token, s", "start", "first_token_s", "lower", 0.25, limit=0.5),
    Wanted("concurrent streams, output tok/s", "streams", "stream_tok_s", "higher", 1.6),
    Wanted("concurrent streams, TTFT p50, ms", "streams", "ttft_p50_ms", "lower", 1.0),
    Wanted("concurrent streams, ITL p99, ms", "streams", "itl_p99_ms", "lower", limit=250.0),
    Wanted(
        "chat against no prefix reuse, s",
        "chat",
        "chat_s",
        "lower",
        0.5,
        peers_workload="chat-no-reuse",
    ),
    Wanted("chat against prefix reuse, s", "chat", "chat_s", "lower", 1.0),
    Wanted("peak RSS, 1 sequence, MB", "decode-1", "peak_rss_bytes", "lower", 1.0, 1.0),
    Wanted("peak RSS, 16 sequences, MB", "decode-16", "peak_rss_bytes", "lower", 1.0, 1.0),
    Wanted("peak RSS, serving streams, MB", "streams", "peak_rss_bytes", "lower", 1.0),
)


@dataclass(frozen=True)
class Row:
    """A line of the table for one engine."""

    wanted: Wanted
    ours: float
    peers: Mapping[str, float]
    """Contestant -> median."""
    wanted_ratio: float | None
    engine: str

    @property
    def best_peer(self) -> str | None:
        if not self.peers:
            return None
        pick = max if self.wanted.better == "higher" else min
        return pick(self.peers, key=lambda name: self.peers[name])

    @property
    def ratio(self) -> float | None:
        """Of trtc's median to the best peer's; None without a peer."""
        return self.ours / self.peers[self.best_peer] if self.best_peer else None

    @property
    def reached(self) -> bool | None:
        """Whether every aim of the line is met; None when nothing was measured to say so."""
        if self.wanted.limit is not None and self.ours >= self.wanted.limit:
            return False
        if self.wanted_ratio is None:
            return True
        if self.ratio is None:
            return None
        if self.wanted.better == "higher":
            return self.ratio >= self.wanted_ratio
        return self.ratio <= self.wanted_ratio


Medians = Mapping[tuple[str, str], Mapping[str, float]]
"""(workload, contestant) -> figure -> median."""


def medians(samples: Iterable[Sample]) -> Medians:
    values: dict[tuple[str, str], dict[str, list[float]]] = {}
    for sample in samples:
        figures = values.setdefault((sample.workload, sample.contestant), {})
        for name, value in sample.figures.items():
            figures.setdefault(name, []).append(value)
    return {
        key: {name: statistics.median(series) for name, series in figures.items()}
        for key, figures in values.items()
    }


def rows(samples: Sequence[Sample]) -> list[Row]:
    """One line an aim and engine, where the engine was measured."""
    middle = medians(samples)
    widths = {sample.contestant: sample.bits for sample in samples if sample.bits}
    ours = {sample.contestant: None for sample in samples if sample.runtime == OURS}
    found = []
    for engine in ours:
        rivals = [name for name in widths if name not in ours and widths[name] == widths[engine]]
        for wanted in WANTED:
            four = widths[engine] == 4
            mine = middle.get((wanted.workload, engine), {}).get(wanted.figure)
            if mine is None or not (four or wanted.other_widths):
                continue
            theirs = {
                name: middle.get((wanted.peers_workload or wanted.workload, name), {}).get(
                    wanted.figure
                )
                for name in rivals
            }
            peers = {name: value for name, value in theirs.items() if value is not None}
            found.append(
                Row(wanted, mine, peers, wanted.ratio if four else wanted.other_widths, engine)
            )
    return found


def append(path: Path, sample: Sample) -> None:
    """Add a run to a .jsonl file, whole as soon as it is over."""
    with path.open("a") as file:
        file.write(json.dumps(asdict(sample)) + "\n")


def load(path: Path) -> list[Sample]:
    """The runs of a .jsonl file; none when there is no such file."""
    if not path.exists():
        return []
    return [Sample(**json.loads(line)) for line in path.read_text().splitlines()]
