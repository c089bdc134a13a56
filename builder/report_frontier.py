"""The report's picture of a search for a recipe: what each size would cost, and the choice."""

from collections.abc import Sequence

from trtc.builder.report_plot import LABELS, WIDTH, svg, text
from trtc.protos.record import Record

_TOP, _HEIGHT = 12.0, 220.0
_TICKS = 4


class FrontierPoint(Record, frozen=True):
    """A recipe that a search has measured."""

    bits: float
    """Of a weight of the linears, scales included."""
    kl: float
    """Mean KL(unquantised || quantised) a token, in nats, of the weights alone."""
    kl_error: float
    """Its standard error."""
    chosen: bool = False
    """Whether the engine has it."""


def frontier_plot(points: Sequence[FrontierPoint]) -> str:
    """Bits across, divergence up; the chosen point stands out."""
    low, high = points[0].bits, max(point.bits for point in points)
    largest = max(point.kl for point in points) or 1.0
    bottom = _TOP + _HEIGHT

    def across(bits: float) -> float:
        return LABELS + (bits - low) / max(high - low, 1e-9) * (WIDTH - LABELS - 60)

    def up(kl: float) -> float:
        return bottom - kl / largest * _HEIGHT

    body = []
    for tick in range(_TICKS + 1):
        kl = tick * largest / _TICKS
        y = up(kl)
        body.append(f'<line class="axis" x1="{LABELS}" x2="{WIDTH}" y1="{y:.2f}" y2="{y:.2f}"/>')
        body.append(text(LABELS - 12, y + 4, f"{kl:.3f}", "faint", "end"))
        bits = low + tick * (high - low) / _TICKS
        body.append(text(across(bits), bottom + 18, f"{bits:.3g} bits", "faint", "middle"))
    line = " ".join(f"{across(point.bits):.2f},{up(point.kl):.2f}" for point in points)
    body.append(f'<polyline class="mean" points="{line}"/>')
    for point in points:
        tone, radius = ("s20", 7) if point.chosen else ("bar", 4)
        x, y = across(point.bits), up(point.kl)
        body.append(
            f'<circle class="cell {tone}" cx="{x:.2f}" cy="{y:.2f}" r="{radius}"><title>'
            f"{point.bits:.3f} bits a weight\n{point.kl:.4f} ± {point.kl_error:.4f} nats a token"
            "</title></circle>"
        )
        if point.chosen:
            label = f"{point.bits:.2f} bits, {point.kl:.4f}"
            body.append(text(x + 12, y - 8, label, "strong", "start"))
    return svg(bottom + 24, "Divergence by bits a weight", body)
