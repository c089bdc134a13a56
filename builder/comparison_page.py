"""The page of `trtc compare`: where two engines part."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from trtc.builder.report_page import Card, page_html, section
from trtc.builder.report_plot import WIDTH, short_name, svg, text
from trtc.protos.manifest import Manifest
from trtc.quant.comparison import Band, Comparison, Continuation, LayerPair

_MAX_LAYERS = 12
_LEFT, _ROW = 150.0, 26.0
"""Of a plot: where bars begin, and from one to the next."""


@dataclass(frozen=True)
class ShownSplit:
    """A position where the likeliest tokens differ, with its tokens as text."""

    before: str
    """The end of what both engines were given."""
    token: str
    choices: tuple[str, str]
    kl: float


@dataclass(frozen=True)
class ShownContinuation:
    """A continuation with its tokens as text."""

    prompt: str
    agreed: str
    choices: tuple[str, str] | None
    found: Continuation


@dataclass(frozen=True)
class ComparisonReport:
    """What the command measured, ready to be shown."""

    names: tuple[str, str]
    """Of the engines."""
    manifests: tuple[Manifest, Manifest]
    text: str
    """What was measured on."""
    comparison: Comparison
    splits: tuple[ShownSplit, ...]
    continuations: tuple[ShownContinuation, ...]
    layers: tuple[LayerPair, ...]


def comparison_html(report: ComparisonReport, version: str) -> str:
    """One page without scripts or outside assets."""
    first, second = report.manifests
    return page_html(
        title=f"{report.names[0]} beside {report.names[1]}",
        heading=f"{report.names[0]} beside {report.names[1]}",
        subtitle=f"{first.model.name}: {report.comparison.tokens:,} predicted tokens of "
        + ("the text that ships with trtc" if report.text == "default" else report.text),
        chips=[
            (f"{letter}", f"{one.scheme.name}, {one.target.name}")
            for letter, one in (("A", first), ("B", second))
        ],
        cards=_cards(report),
        sections=_sections(report),
        footer=f"Written by trtc {version}. `trtc compare --json` has these figures.",
    )


def _cards(report: ComparisonReport) -> list[Card]:
    found = report.comparison
    before, after = found.perplexities
    parted = [one.found for one in report.continuations if one.choices is not None]
    lengths = sorted(len(one.agreed) for one in parted)
    part = f"{lengths[len(lengths) // 2]}" if lengths else "&ndash;"
    return [
        ("Divergence (KL)", f"{found.kl:.4f} <small>nats</small>", "a token, of B from A"),
        (
            "Same first choice",
            f"{100 * found.top1:.1f}<small> %</small>",
            "of positions, given the same text",
        ),
        ("Perplexity", f"{after:.3f}", f"of B; {before:.3f} of A"),
        (
            "Tokens until they part",
            part,
            f"at the median, greedily; {len(parted)} of {len(report.continuations)} "
            "continuations part",
        ),
    ]


def _sections(report: ComparisonReport) -> list[str]:
    sections = [
        section(
            "By position",
            "Mean divergence of tokens by how many come before them. What grows with the position "
            "is in attention and its cache.",
            _band_bars(report.comparison.bands),
        )
    ]
    if report.splits:
        sections.append(
            section(
                "Where their choices differ most",
                "Given the same text, the likeliest token of each, at the positions where the two "
                "differ and diverge most.",
                _table(
                    ("given", "the text has", "A", "B", "KL"),
                    [
                        (one.before, one.token, *one.choices, f"{one.kl:.3f}")
                        for one in report.splits
                    ],
                ),
            )
        )
    sections.append(
        section(
            "Where their texts part",
            "Greedy continuations. The last figures are the logits by which each led at that "
            "token: where both are small, rounding parts them.",
            _table(
                ("prompt", "both go on", "A then", "B then", "margins"),
                [_continuation_row(one) for one in report.continuations],
            ),
        )
    )
    if report.layers:
        sections.append(
            section(
                "Layer by layer",
                "Signal to quantisation noise at the output of linears, as each build measured "
                "it against the unquantised model: those that differ most.",
                _table(
                    ("linear", "A", "B", "B is noisier by"),
                    [
                        (
                            short_name(one.layer),
                            *(f"{decibels:.1f} dB" for decibels in one.sqnr_db),
                            f"{one.difference:+.1f} dB",
                        )
                        for one in report.layers[:_MAX_LAYERS]
                    ],
                ),
            )
        )
    return sections


def _continuation_row(one: ShownContinuation) -> tuple[str, ...]:
    if one.choices is None or one.found.margins is None:
        return (one.prompt, one.agreed, "", "", f"alike, {len(one.found.agreed)} tokens")
    margins = ", ".join(f"{margin:.2f}" for margin in one.found.margins)
    return (one.prompt, one.agreed, *one.choices, margins)


def _band_bars(bands: Sequence[Band]) -> str:
    right = WIDTH - 260.0
    largest = max(max(band.kl for band in bands), 1e-12)
    body = []
    for number, band in enumerate(bands):
        y = number * _ROW + 4
        width = max(band.kl / largest * (right - _LEFT), 1.5)
        body += [
            text(0, y + 13, positions(band), "name", "start"),
            f'<rect class="bar" x="{_LEFT}" y="{y}" width="{width:.2f}" height="16" rx="3"/>',
            text(
                _LEFT + width + 12,
                y + 13,
                f"{band.kl:.4f} nats, {band.top1:.1%} alike, {band.tokens:,} tokens",
                "",
                "start",
            ),
        ]
    return svg(len(bands) * _ROW + 4, "Divergence by position", body)


def positions(band: Band) -> str:
    """A band's positions in words."""
    last = band.end - 1
    return f"token {band.begin}" if last == band.begin else f"tokens {band.begin}-{last}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"
