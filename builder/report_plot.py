"""The report's plots, as SVG with the page's colours. Darker cells have more quantisation noise."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from statistics import fmean, median

from trtc.protos.manifest import LayerError

STEPS = 24
"""Shades of a ramp; classes s0 (silent) ... s23 (noisiest)."""
LIGHT_RAMP = ("#f1eee6", "#f7dfb4", "#f3b56b", "#e27c3e", "#c0431f", "#7d1a14")
DARK_RAMP = ("#1a1f2a", "#33264a", "#6d2a5f", "#b8414f", "#ef8540", "#ffe08a")
KINDS = ("q", "k", "v", "qkv", "o", "gate", "up", "gate up", "down")
_KIND_OF_LINEAR: Mapping[str, str] = {
    "q_proj": "q",
    "k_proj": "k",
    "v_proj": "v",
    "qkv_proj": "qkv",
    "o_proj": "o",
    "gate_proj": "gate",
    "w1": "gate",
    "up_proj": "up",
    "w3": "up",
    "gate_up_proj": "gate up",
    "down_proj": "down",
    "w2": "down",
}
_SITE = re.compile(r"layers\.(?P<layer>\d+)\.(?:.*\.)?(?P<linear>\w+)$")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
WIDTH = 1000.0
LABELS = 66.0
"""Left of the columns, for the rows' names."""
ROW = 26.0
CELL_GAP = 1.5
_WORST = 12
_MAX_SLICES = 16
"""Experts drawn side by side in a cell; of more, the noisiest stand for them."""


@dataclass(frozen=True)
class Site:
    """Where a linear is in the model."""

    layer: int
    kind: str
    error: LayerError


@dataclass(frozen=True)
class Scale:
    """Decibels between two ends, and their shades."""

    low: float
    high: float

    def shade(self, decibels: float) -> int:
        """0 at `high` and above, STEPS - 1 at `low` and below."""
        share = (self.high - decibels) / (self.high - self.low)
        return min(max(round(share * (STEPS - 1)), 0), STEPS - 1)

    @property
    def ticks(self) -> tuple[float, ...]:
        step = next(s for s in (5, 10, 20, 50) if self.high - self.low <= 5 * s)
        first = int(self.low + step - 1) // step * step
        return tuple(float(tick) for tick in range(first, int(self.high) + 1, step))


def find_sites(errors: Iterable[LayerError]) -> tuple[Site, ...]:
    """Errors whose names say where they are; others have no cell to go into."""
    sites = []
    for error in errors:
        match = _SITE.search(error.layer)
        if match and match["linear"] in _KIND_OF_LINEAR:
            sites.append(Site(int(match["layer"]), _KIND_OF_LINEAR[match["linear"]], error))
    return tuple(sites)


SHADES = Scale(10.0, 45.0)
"""The same in every report, so that two can be compared by eye: 4-bit weights lie near 20 dB, E4M3
near 30, int8 near 40."""


def measured_range(errors: Iterable[LayerError]) -> Scale:
    """Whole fives of decibels around what was measured."""
    values = [error.sqnr_db for error in errors]
    low, high = min(values) // 5 * 5.0, -(-max(values) // 5) * 5.0
    return Scale(low, max(high, low + 10.0))


def short_name(layer: str) -> str:
    """`model.layers.3.mlp.experts.5.down_proj` -> `layer 3 down, expert 5`."""
    match = _SITE.search(layer)
    if not match or match["linear"] not in _KIND_OF_LINEAR:
        return layer
    expert = _EXPERT.search(layer)
    which = f", expert {expert[1]}" if expert else ""
    return f"layer {match['layer']} {_KIND_OF_LINEAR[match['linear']]}{which}"


def ramp(stops: Sequence[str]) -> tuple[str, ...]:
    """STEPS colours through `stops`, evenly."""
    colours = []
    for step in range(STEPS):
        position = step / (STEPS - 1) * (len(stops) - 1)
        index = min(int(position), len(stops) - 2)
        first, second = (_rgb(stops[index + i]) for i in (0, 1))
        mixed = (
            round(a + (b - a) * (position - index)) for a, b in zip(first, second, strict=True)
        )
        colours.append("#" + "".join(f"{value:02x}" for value in mixed))
    return tuple(colours)


def _rgb(colour: str) -> tuple[int, ...]:
    return tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5))


def heat_map(errors: Sequence[LayerError]) -> str:
    """Layers across, kinds of linears down, and each layer's mean and range underneath."""
    sites = find_sites(errors)
    num_layers = max(site.layer for site in sites) + 1
    kinds = [kind for kind in KINDS if any(site.kind == kind for site in sites)]
    column = (WIDTH - LABELS) / num_layers
    cells: dict[tuple[int, str], list[LayerError]] = {}
    for site in sites:
        cells.setdefault((site.layer, site.kind), []).append(site.error)
    top = 34.0
    bottom = top + len(kinds) * ROW
    body = [*_legend()]
    for row, kind in enumerate(kinds):
        y = top + row * ROW
        body.append(text(LABELS - 12, y + ROW / 2 + 4, kind, "name", "end"))
        for layer in range(num_layers):
            x = LABELS + layer * column
            body += _cell(x, y, column, cells.get((layer, kind), []))
    body += layer_numbers(num_layers, column, bottom)
    body += _profile(sites, num_layers, column, bottom + 34)
    height = bottom + 34 + _PROFILE + 22
    label = "Signal to noise of every quantised linear, layer by layer"
    return svg(height, label, body)


def _cell(x: float, y: float, width: float, errors: Sequence[LayerError]) -> Iterator[str]:
    gap = CELL_GAP if width > 8 else 0.5
    inner, height = width - gap, ROW - 1.5
    if not errors:
        yield f'<rect class="empty" x="{x:.2f}" y="{y:.2f}" width="{inner:.2f}" height="{height}"/>'
        return
    shown = errors
    if len(errors) > _MAX_SLICES:
        shown = sorted(errors, key=lambda error: error.sqnr_db)[:_MAX_SLICES]
    part = inner / len(shown)
    for number, error in enumerate(shown):
        overlap = 0.3 if number + 1 < len(shown) else 0.0  # no hairlines between slices
        yield (
            f'<rect class="cell s{SHADES.shade(error.sqnr_db)}" x="{x + number * part:.2f}" '
            f'y="{y:.2f}" width="{part + overlap:.2f}" height="{height}">'
            f"<title>{escape(_described(error))}</title></rect>"
        )


def _described(error: LayerError) -> str:
    return f"{error.layer}\n{error.sqnr_db:.1f} dB, largest error {error.max_abs_error:.3g}"


def _legend() -> Iterator[str]:
    width, x = 240.0, WIDTH - 240.0
    step = width / STEPS
    for number in range(STEPS):
        yield (
            f'<rect class="s{STEPS - 1 - number}" x="{x + number * step:.2f}" y="0" '
            f'width="{step + 0.3:.2f}" height="9"/>'
        )
    for tick in SHADES.ticks:
        at = x + (tick - SHADES.low) / (SHADES.high - SHADES.low) * width
        yield text(at, 22, f"{tick:g}", "faint", "middle")
    yield text(x - 12, 9, "signal to noise, dB", "", "end")


def layer_numbers(num_layers: int, column: float, y: float) -> Iterator[str]:
    """Numbers below columns of layers, as many as there is room for."""
    every = next(n for n in (1, 2, 4, 5, 10, 20, 50, 100, 1000) if column * n >= 22)
    for layer in range(0, num_layers, every):
        yield text(LABELS + (layer + 0.5) * column, y + 15, str(layer), "faint", "middle")
    yield text(LABELS - 12, y + 15, "layer", "faint", "end")


_PROFILE = 92.0


def _profile(sites: Sequence[Site], num_layers: int, column: float, top: float) -> Iterator[str]:
    """Mean of each layer as a line, its noisiest and calmest linear as a band."""
    scale = measured_range(site.error for site in sites)

    def height(decibels: float) -> float:
        return top + (scale.high - decibels) / (scale.high - scale.low) * _PROFILE

    for tick in scale.ticks:
        y = height(tick)
        yield f'<line class="axis" x1="{LABELS}" x2="{WIDTH}" y1="{y:.2f}" y2="{y:.2f}"/>'
        yield text(LABELS - 12, y + 4, f"{tick:g} dB", "faint", "end")
    values: dict[int, list[float]] = {}
    for site in sites:
        values.setdefault(site.layer, []).append(site.error.sqnr_db)
    layers = [layer for layer in range(num_layers) if layer in values]
    across = {layer: LABELS + (layer + 0.5) * column for layer in layers}
    upper = [f"{across[n]:.2f},{height(max(values[n])):.2f}" for n in layers]
    lower = [f"{across[n]:.2f},{height(min(values[n])):.2f}" for n in reversed(layers)]
    mean = [f"{across[n]:.2f},{height(fmean(values[n])):.2f}" for n in layers]
    yield f'<polygon class="band" points="{" ".join(upper + lower)}"/>'
    yield f'<polyline class="mean" points="{" ".join(mean)}"/>'


def worst_strip(errors: Sequence[LayerError]) -> str:
    """The noisiest linears on one axis: how far each falls short of the median of all."""
    worst = sorted(errors, key=lambda error: (error.sqnr_db, error.layer))[:_WORST]
    middle = median(error.sqnr_db for error in errors)
    lowest = worst[0].sqnr_db
    left, right = 250.0, WIDTH - 190.0

    def across(decibels: float) -> float:
        return left + (decibels - lowest) / max(middle - lowest, 0.1) * (right - left)

    top, row = 26.0, 24.0
    bottom = top + row * len(worst)
    body = [
        text(right, top - 10, f"median {middle:.1f} dB", "faint", "middle"),
        text(WIDTH, top - 10, "largest error", "faint", "end"),
    ]
    for number, error in enumerate(worst):
        y = top + (number + 0.5) * row
        x = across(error.sqnr_db)
        body += [
            text(0, y + 4, short_name(error.layer), "name", "start"),
            f'<line class="stem" x1="{x:.2f}" x2="{right}" y1="{y}" y2="{y}"/>',
            f'<circle class="cell s{SHADES.shade(error.sqnr_db)}" cx="{x:.2f}" cy="{y}" r="7">'
            f"<title>{escape(_described(error))}</title></circle>",
            text(x - 14, y + 4, f"{error.sqnr_db:.1f} dB", "strong", "end"),
            text(WIDTH, y + 4, f"{error.max_abs_error:.3g}", "", "end"),
        ]
    body.append(f'<line class="median" x1="{right}" x2="{right}" y1="{top - 4}" y2="{bottom}"/>')
    return svg(bottom + 6, "The noisiest linears", body)


def byte_bars(parts: Sequence[tuple[str, int, str]], ghost: tuple[str, int] | None) -> str:
    """Labelled bars of bytes on one axis.

    Args:
        parts: (name, bytes, what to write behind the bar).
        ghost: (name, bytes) drawn as an outline around the first bar, for comparison.
    """
    left, right = 130.0, WIDTH - 250.0
    largest = max([size for _, size, _ in parts] + [ghost[1] if ghost else 1])
    row = 34.0
    body = []
    for number, (name, size, caption) in enumerate(parts):
        y = number * row + 4
        width = max(size / largest * (right - left), 1.5)
        end = left + width
        body.append(text(0, y + 15, name, "name", "start"))
        if number == 0 and ghost and ghost[1] > size:
            end = left + ghost[1] / largest * (right - left)
            body.append(
                f'<rect class="ghost" x="{left}" y="{y}" width="{end - left:.2f}" height="20" '
                f'rx="4"><title>{escape(ghost[0])}</title></rect>'
            )
        tone = "bar" if number == 0 else "bar-soft"
        body.append(
            f'<rect class="{tone}" x="{left}" y="{y}" width="{width:.2f}" height="20" rx="4"/>'
        )
        body.append(text(end + 12, y + 15, caption, "", "start"))
    return svg(len(parts) * row, "Bytes", body)


def svg(height: float, label: str, body: Iterable[str]) -> str:
    """A drawing as wide as the page, WIDTH units across."""
    return (
        f'<svg viewBox="0 0 {WIDTH:g} {height:g}" role="img" aria-label="{escape(label)}">\n'
        + "\n".join(body)
        + "\n</svg>"
    )


def text(x: float, y: float, content: str, kind: str, anchor: str) -> str:
    """A label; `kind` is a class of the page, `anchor` where x is: start, middle or end."""
    return (
        f'<text class="{kind}" x="{x:.2f}" y="{y:.2f}" '
        f'text-anchor="{anchor}">{escape(content)}</text>'
    )
