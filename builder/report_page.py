"""The frame of the pages that trtc writes: one file without scripts or outside assets."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template

from trtc.builder.report_plot import DARK_RAMP, LIGHT_RAMP, ramp

_TEMPLATE = Path(__file__).parent / "report.html"

Card = tuple[str, str, str]
"""(name, value as HTML, note)."""


def page_html(
    *,
    title: str,
    heading: str,
    subtitle: str,
    chips: Sequence[tuple[str, str]],
    cards: Sequence[Card],
    sections: Sequence[str],
    footer: str,
) -> str:
    """A page.

    Args:
        chips: (name, value) below the heading.
        cards: the large figures.
        sections: HTML, as `section` makes it.
    """
    return Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=escape(title),
        heading=escape(heading),
        subtitle=escape(subtitle),
        chips="".join(f"<li>{escape(name)} <b>{escape(value)}</b></li>" for name, value in chips),
        figures=_figures(cards),
        sections="\n".join(sections),
        footer=escape(footer),
        light_ramp=_ramp_variables(LIGHT_RAMP),
        dark_ramp=_ramp_variables(DARK_RAMP),
        ramp_classes="\n".join(
            f".s{step} {{ fill: var(--s{step}); }}" for step in range(len(ramp(LIGHT_RAMP)))
        ),
    )


def section(title: str, introduction: str, figure: str) -> str:
    return (
        f"<section>\n<h2>{escape(title)}</h2>\n<p>{escape(introduction)}</p>\n"
        f"<figure>{figure}</figure>\n</section>"
    )


def _figures(cards: Sequence[Card]) -> str:
    return (
        '<dl class="figures">'
        + "".join(
            f"<div><dt>{name}</dt><dd>{value}</dd><p>{escape(note)}</p></div>"
            for name, value, note in cards
        )
        + "</dl>"
    )


def _ramp_variables(stops: Sequence[str]) -> str:
    return " ".join(f"--s{step}: {colour};" for step, colour in enumerate(ramp(stops)))
