"""A comparison of two engines as tables for a terminal."""

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trtc.builder.comparison_page import ComparisonReport, positions
from trtc.builder.report_plot import short_name

_SHOWN_LAYERS = 6


def print_comparison(report: ComparisonReport) -> None:
    console = Console()
    for letter, name, manifest in zip("AB", report.names, report.manifests, strict=True):
        line = f"{letter}  {name}: {manifest.scheme.name}, {manifest.target.name}"
        console.print(escape(line), highlight=False, soft_wrap=True)
    found = report.comparison
    before, after = found.perplexities
    console.print(
        f"{found.tokens} tokens: KL {found.kl:.6f} nats a token, top-1 {found.top1:.2%} alike, "
        f"perplexity {before:.4f} and {after:.4f}\n",
        highlight=False,
        soft_wrap=True,
    )
    console.print(_bands(report))
    if report.splits:
        console.print(_splits(report))
    console.print(_continuations(report))
    if report.layers:
        console.print(_layers(report))


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None)
    for name in columns:
        table.add_column(name, overflow="fold")
    return table


def _bands(report: ComparisonReport) -> Table:
    table = _table("By position", "", "KL", "top-1", "tokens")
    for band in report.comparison.bands:
        table.add_row(positions(band), f"{band.kl:.6f}", f"{band.top1:.1%}", str(band.tokens))
    return table


def _splits(report: ComparisonReport) -> Table:
    table = _table("Where their choices differ most", "given", "text", "A", "B", "KL")
    for one in report.splits:
        cells = (one.before, one.token, *one.choices)
        table.add_row(*(escape(cell) for cell in cells), f"{one.kl:.3f}")
    return table


def _continuations(report: ComparisonReport) -> Table:
    table = _table("Where their texts part", "both", "tokens", "A then", "B then", "margins")
    for one in report.continuations:
        count = str(len(one.found.agreed))
        if one.choices is None or one.found.margins is None:
            table.add_row(escape(one.agreed), count, "alike", "", "")
            continue
        margins = ", ".join(f"{margin:.2f}" for margin in one.found.margins)
        table.add_row(*map(escape, (one.agreed, count, *one.choices)), margins)
    return table


def _layers(report: ComparisonReport) -> Table:
    table = _table("Noise of linears", "", "A", "B", "B is noisier by")
    for one in report.layers[:_SHOWN_LAYERS]:
        table.add_row(
            escape(short_name(one.layer)),
            *(f"{decibels:.1f} dB" for decibels in one.sqnr_db),
            f"{one.difference:+.1f} dB",
        )
    return table
