"""The ratios as a picture: SVG written by hand, so that nothing must be installed for it."""

import math
from collections.abc import Iterator, Sequence
from html import escape

from examples.bench.peers.results import Row

_WIDTH, _LABELS, _VALUES = 900.0, 330.0, 90.0
_ROW, _HEADER = 22.0, 34.0
_TICKS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
_STYLE = (
    "text{font:13px sans-serif;fill:#222}.engine{font-weight:bold}.tick{font-size:11px;fill:#666}"
    ".grid{stroke:#ddd}.one{stroke:#888}.yes{fill:#3a7d5d}.no{fill:#c26a3d}.open{fill:#888}"
    ".wanted{stroke:#111;stroke-width:2}"
)


def times_better(row: Row) -> float | None:
    """The ratio turned so that above 1 is better; None without a peer."""
    if row.ratio is None:
        return None
    return row.ratio if row.wanted.better == "higher" else 1 / row.ratio


def ratio_plot(rows: Sequence[Row]) -> str:
    """A bar a line of the table, on a logarithmic axis, with a mark at what is wanted."""
    shown = [row for row in rows if row.ratio is not None]
    body: list[str] = []
    y = _HEADER
    engine = ""
    for row in shown:
        if row.engine != engine:
            engine = row.engine
            body.append(_text(8, y + 15, f"{engine}: times better than the best peer", "engine"))
            y += _ROW
        body += _bar(row, y)
        y += _ROW
    height = y + 12
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:g} {height:g}" '
        f'width="{_WIDTH:g}" height="{height:g}" role="img" '
        'aria-label="trtc beside the best peer, and what is wanted">',
        f"<style>{_STYLE}</style>",
        '<rect width="100%" height="100%" fill="#fff"/>',
        *_axis(height),
        *body,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _axis(height: float) -> Iterator[str]:
    for tick in _TICKS:
        x = _x(tick)
        kind = "one" if tick == 1 else "grid"
        yield f'<line class="{kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{_HEADER - 8}" y2="{height}"/>'
        yield _text(x, _HEADER - 14, f"{tick:g}x", "tick", "middle")


def _bar(row: Row, y: float) -> Iterator[str]:
    better = times_better(row)
    assert better is not None
    begin, end = sorted((_x(1.0), _x(better)))
    kind = {True: "yes", False: "no", None: "open"}[row.reached]
    yield _text(_LABELS - 10, y + 15, row.wanted.title, "name", "end")
    yield (
        f'<rect class="{kind}" x="{begin:.1f}" y="{y + 4:.1f}" width="{end - begin:.1f}" '
        f'height="{_ROW - 8:g}"><title>{escape(str(row.best_peer))}</title></rect>'
    )
    if row.wanted_ratio is not None:
        x = _x(row.wanted_ratio if row.wanted.better == "higher" else 1 / row.wanted_ratio)
        yield f'<line class="wanted" x1="{x:.1f}" x2="{x:.1f}" y1="{y + 2:.1f}" y2="{y + 20:.1f}"/>'
    yield _text(_WIDTH - 8, y + 15, f"{better:.2f}x", "value", "end")


def _x(ratio: float) -> float:
    """Where a ratio lies; beyond the outer ticks it is drawn at them."""
    low, high = math.log(_TICKS[0]), math.log(_TICKS[-1])
    share = (min(max(math.log(ratio), low), high) - low) / (high - low)
    return _LABELS + share * (_WIDTH - _LABELS - _VALUES)


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
    )
