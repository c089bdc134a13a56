"""The report's map of formats: what a recipe gives each site, layer by layer."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from html import escape

from trtc.builder.report_plot import (
    CELL_GAP,
    LABELS,
    ROW,
    STEPS,
    WIDTH,
    layer_numbers,
    svg,
    text,
)
from trtc.quant.site_format import FORMATS

_SITE = re.compile(r"layers\.(\d+)\.(?:.*\.)?(\w+)$")
_KINDS: Mapping[str, str] = {
    "qkv_proj": "qkv",
    "o_proj": "o",
    "gate_up_proj": "gate up",
    "down_proj": "down",
    "experts": "experts",
}
"""Site -> the name of its row; other sites have rows under their own names."""
_TOP = 34.0
_LEGEND = 110.0


def counted_formats(formats: Mapping[str, str]) -> str:
    """How many sites each format has, narrow ones first: `int4_g128 20, int8_g128 12 sites`."""
    counts = Counter(formats.values())
    return ", ".join(f"{name} {counts[name]}" for name in FORMATS if counts[name]) + " sites"


def format_map(formats: Mapping[str, str]) -> str:
    """Layers across, sites of a layer down; narrow formats have the most ink."""
    cells = dict(_cells(formats))
    kinds = list(dict.fromkeys(kind for _, kind in cells))
    num_layers = max((layer for layer, _ in cells), default=0) + 1
    column = (WIDTH - LABELS) / num_layers
    body = list(_legend([name for name in FORMATS if name in formats.values()]))
    for row, kind in enumerate(kinds):
        y = _TOP + row * ROW
        body.append(text(LABELS - 12, y + ROW / 2 + 4, kind, "name", "end"))
        for layer in range(num_layers):
            if (layer, kind) in cells:
                site, name = cells[layer, kind]
                x, width = LABELS + layer * column, column - CELL_GAP
                body.append(
                    f'<rect class="cell {_shade(name)}" x="{x:.2f}" y="{y:.2f}" '
                    f'width="{width:.2f}" height="{ROW - CELL_GAP:g}">'
                    f"<title>{escape(site)}\n{name}</title></rect>"
                )
    bottom = _TOP + len(kinds) * ROW
    body += layer_numbers(num_layers, column, bottom)
    return svg(bottom + 22, "The format of every site, layer by layer", body)


def _cells(formats: Mapping[str, str]) -> Iterator[tuple[tuple[int, str], tuple[str, str]]]:
    """(layer, kind) -> (site, format) of sites whose names say where they are."""
    for site, name in formats.items():
        if match := _SITE.search(site):
            kind = _KINDS.get(match[2], match[2].removesuffix("_proj"))
            yield (int(match[1]), kind), (site, name)


def _shade(name: str) -> str:
    order = list(FORMATS)
    return f"s{round((len(order) - 1 - order.index(name)) / (len(order) - 1) * (STEPS - 3))}"


def _legend(names: list[str]) -> Iterator[str]:
    for number, name in enumerate(names):
        x = WIDTH - (len(names) - number) * _LEGEND
        yield f'<rect class="{_shade(name)}" x="{x:.2f}" y="0" width="18" height="12"/>'
        yield text(x + 24, 10, name, "", "start")
