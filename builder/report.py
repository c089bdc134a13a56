"""The report of a build: report.json, report.html and the terminal's summary."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trtc.builder.report_formats import counted_formats, format_map
from trtc.builder.report_frontier import FrontierPoint, frontier_plot
from trtc.builder.report_page import Card, page_html, section
from trtc.builder.report_plot import (
    DARK_RAMP,
    KINDS,
    SHADES,
    byte_bars,
    find_sites,
    heat_map,
    ramp,
    short_name,
    worst_strip,
)
from trtc.protos.kv import CacheLayout
from trtc.protos.manifest import (
    REPORT_HTML,
    REPORT_JSON,
    AccuracyFacts,
    ByteLedger,
    LayerError,
    Limits,
    Manifest,
    ModelFacts,
    SchemeFacts,
    TargetFacts,
)
from trtc.protos.record import Record, record_json
from trtc.protos.units import count, size, split_size
from trtc.quant.calibration_facts import CalibrationFacts

_VERDICTS = (
    (0.01, "hardly distinguishable from the original"),
    (0.05, "close to the original"),
    (0.2, "visibly different from the original"),
)
_COMPARED = ("Divergence (KL)", "Same first choice")
"""Figures that need the unquantised model."""
_ROUNDED_ON_CPUS = ("int4", "int6", "w4a8", "fp8", "nvfp4", "mxfp4_weights", "mixed")
"""How the names of schemes begin whose activations the CPU target rounds."""
_TABLES = {
    "i8": "int8, a scale for each group of 128",
    "i6": "6-bit integers, a scale for each group of 128",
    "iq4": "4-bit codes, a scale for each group of 32",
    "iq4_g16": "4-bit codes, a scale for each group of 16",
}
"""Narrow lm_heads and embeddings, as the manifest has them."""
_WORST_IN_TERMINAL = 3
_MAX_NAMED = 8
_BLOCKS = "░▒▓█"
"""Of the terminal's map, calm to noisy."""
_MAP_COLUMNS = 48
"""Layers across in the terminal; of more, neighbours share a column by their noisiest."""


class CalibrationReport(Record, frozen=True):
    source: str
    sha256: str
    tokens: int
    starved_experts: tuple[str, ...]


class Report(Record, frozen=True):
    """The contents of report.json, which the pages show."""

    trtc_version: str
    model: ModelFacts
    scheme: SchemeFacts
    target: TargetFacts
    kv: CacheLayout
    limits: Limits
    ledger: ByteLedger
    accuracy: AccuracyFacts | None
    calibration: CalibrationReport | None
    notes: tuple[str, ...]
    frontier: tuple[FrontierPoint, ...] = ()
    """What the search for a recipe measured, from narrow to wide; empty: there was none."""


def make_report(
    manifest: Manifest,
    calibration: CalibrationFacts | None,
    notes: Sequence[str] = (),
    frontier: Sequence[FrontierPoint] = (),
) -> Report:
    """The report of an engine.

    Args:
        manifest: complete but for its file hashes.
        calibration: of this build; None when it did not calibrate.
        notes: what the user should know.
        frontier: what the search for its recipe measured.
    """
    return Report(
        trtc_version=manifest.trtc_version,
        model=manifest.model,
        scheme=manifest.scheme,
        target=manifest.target,
        kv=manifest.kv,
        limits=manifest.limits,
        ledger=manifest.ledger,
        accuracy=manifest.accuracy,
        calibration=None
        if calibration is None
        else CalibrationReport(
            source=calibration.source,
            sha256=calibration.sha256,
            tokens=calibration.tokens,
            starved_experts=calibration.starved_experts,
        ),
        notes=tuple(notes),
        frontier=tuple(frontier),
    )


def write_report(report: Report, engine: Path) -> None:
    """Write report.json and report.html into an engine directory; same report, same bytes."""
    (engine / REPORT_JSON).write_bytes(record_json(report))
    (engine / REPORT_HTML).write_text(report_html(report), encoding="utf-8")


def report_html(report: Report) -> str:
    """One page without scripts or outside assets."""
    model = report.model
    return page_html(
        title=f"{model.name} in {report.scheme.name}",
        heading=model.name,
        subtitle=f"{model.architecture}, {count(model.num_parameters)} parameters in "
        f"{model.num_layers} layers",
        chips=_chips(report),
        cards=[*_accuracy_cards(report.accuracy), _size_card(report)],
        sections=_sections(report),
        footer=f"Written by trtc {report.trtc_version}. Everything on this page is in report.json.",
    )


def _chips(report: Report) -> list[tuple[str, str]]:
    scheme = report.scheme
    origin = "quantised here" if scheme.source == "inline" else f"from {scheme.source}"
    if scheme.name in ("fp32", "bf16"):
        origin = "not quantised"
    return [
        ("weights", scheme.name),
        ("KV cache", scheme.kv_dtype),
        ("target", report.target.name),
        ("scheme", origin),
        ("context", f"{report.limits.max_seq_len:,} tokens"),
        *([("ranks", report.target.parallelism)] if report.target.parallelism else ()),
    ]


def _accuracy_cards(accuracy: AccuracyFacts | None) -> list[Card]:
    """Of what was measured."""
    if accuracy is None:
        missing = "not measured by this build"
        return [(name, "&ndash;", missing) for name in (*_COMPARED, "Perplexity")]
    cards = []
    if accuracy.kl is not None and accuracy.top1 is not None:
        value = f"{accuracy.kl:.4f} <small>nats</small>"
        cards.append((_COMPARED[0], value, f"a token: {verdict(accuracy.kl)}"))
        cards.append(
            (
                _COMPARED[1],
                f"{100 * accuracy.top1:.1f}<small> %</small>",
                "of positions, against the unquantised model",
            )
        )
    else:
        missing = "no unquantised checkpoint to compare with"
        cards += [(name, "&ndash;", missing) for name in _COMPARED]
    note = f"on {accuracy.tokens:,} held-out tokens"
    if accuracy.reference_perplexity is not None:
        change = 100 * (accuracy.perplexity / accuracy.reference_perplexity - 1)
        note = f"{accuracy.reference_perplexity:.3f} before, {change:+.2f} %; {note}"
    cards.append(("Perplexity", f"{accuracy.perplexity:.3f}", note))
    return cards


def verdict(kl: float) -> str:
    """What a KL divergence means, in words."""
    return next((words for limit, words in _VERDICTS if kl < limit), "far from the original")


def _size_card(report: Report) -> Card:
    value, unit = split_size(_weights_bytes(report))
    return ("Weights", f"{value} <small>{unit}</small>", _beside_bf16(report))


def _beside_bf16(report: Report) -> str:
    """The engine's weights beside the parameters at two bytes each."""
    ratio = _bf16_bytes(report) / max(_weights_bytes(report), 1)
    if ratio >= 1.005:
        return f"{ratio:.2f} times smaller than bf16"
    if ratio > 1 / 1.005:
        return "as large as bf16"
    return f"{1 / ratio:.2f} times as large as bf16"


def _weights_bytes(report: Report) -> int:
    """Of all ranks together."""
    return report.ledger.weights * report.target.tp


def _bf16_bytes(report: Report) -> int:
    return 2 * report.model.num_parameters


def _sections(report: Report) -> list[str]:
    sections = []
    layers = report.accuracy.layers if report.accuracy is not None else ()
    if report.frontier:
        sections.append(
            section(
                "What each size would cost",
                "Divergence in nats a token of the recipes that the search measured, of the "
                "weights alone, by bits a weight of the linears. The large point was chosen.",
                frontier_plot(report.frontier),
            )
        )
    if report.scheme.formats:
        sections.append(
            section(
                "What each site is stored in",
                "The recipe's format of every site: linears that are one matrix in the engine. "
                "Narrow formats have the most ink. recipe.json repeats it.",
                format_map(report.scheme.formats),
            )
        )
    if find_sites(layers):
        sections.append(
            section(
                "What it cost, layer by layer",
                "Signal to quantisation noise at the output of every quantised linear, on held-out "
                "text. Ink is noise: what quantisation left alone melts into the page. Shades mean "
                "the same in every report. Point at a cell for its figures.",
                heat_map(layers),
            )
        )
    if layers:
        sections.append(
            section(
                "Where it hurts most",
                f"The noisiest linears. {_keep_advice(layers)} leaves the first unquantised.",
                worst_strip(layers),
            )
        )
    sections.append(_ledger_section(report))
    sections.append(_facts_section(report))
    return sections


def _keep_advice(layers: Sequence[LayerError]) -> str:
    worst = min(layers, key=lambda layer: (layer.sqnr_db, layer.layer))
    return f"--keep '{worst.layer}=bf16'"


def _ledger_section(report: Report) -> str:
    ledger, kv, ranks = report.ledger, report.kv, report.target.tp
    pages = kv.pages_of_sequence(report.limits.max_seq_len)
    context = pages * ledger.page
    parts = [
        ("weights", ledger.weights, size(ledger.weights)),
        ("activations", ledger.activations, size(ledger.activations)),
        (
            "one full context",
            context,
            f"{size(context)} = {pages:,} pages of {size(ledger.page)}",
        ),
    ]
    bf16 = _bf16_bytes(report) // ranks
    each = f"On each of the {ranks} GPUs. " if ranks > 1 else ""
    return section(
        "Where the bytes go",
        f"{each}The dashed outline is what the weights would take in bf16 ({size(bf16)}). Every "
        f"sequence takes KV pages of {kv.page_size} tokens as it grows, up to one full context.",
        byte_bars(parts, (f"bf16: {size(bf16)}", bf16)),
    )


def _facts_section(report: Report) -> str:
    rows = "".join(
        f"<tr><th>{escape(name)}</th><td>{value}</td></tr>" for name, value in _facts(report)
    )
    return f"<section>\n<h2>Facts</h2>\n<p></p>\n<table>{rows}</table>\n</section>"


def _facts(report: Report) -> list[tuple[str, str]]:
    limits, calibration, accuracy = report.limits, report.calibration, report.accuracy
    facts = [
        ("Toolchain", escape(report.target.toolchain)),
        ("Code for", escape(", ".join(report.target.archs))),
        (
            "Limits",
            f"{limits.max_batch_size} sequences and {limits.max_num_tokens:,} tokens a step",
        ),
    ]
    if report.target.kind == "cpu" and report.scheme.name.startswith(_ROUNDED_ON_CPUS):
        exact = report.scheme.exact_activations
        facts.append(
            (
                "Activations",
                "the scheme's" if exact else "rounded to int8, a scale a token and group",
            )
        )
    if report.scheme.formats:
        facts.append(("Formats", escape(counted_formats(report.scheme.formats))))
    if report.scheme.kept:
        facts.append(("Kept in bf16", escape(", ".join(report.scheme.kept))))
    tables = {"lm_head": report.scheme.lm_head, "Embeddings": report.scheme.embedding}
    for site, table in tables.items():
        if table in _TABLES:
            facts.append((site, _TABLES[table]))
    if calibration is not None:
        facts.append(("Calibrated on", escape(_text(calibration.source, calibration.tokens))))
        facts.append(("Calibration text", f"<code>{escape(calibration.sha256)}</code>"))
    if calibration is not None and calibration.starved_experts:
        names = ", ".join(short_expert(name) for name in calibration.starved_experts)
        facts.append(("Experts hardly reached", escape(names)))
    if accuracy is not None:
        facts.append(("Measured on", escape(accuracy.measured_on)))
        facts.append(("Measured with", escape(_text(accuracy.text, accuracy.tokens))))
        facts.append(("Held-out text", f"<code>{escape(accuracy.text_sha256)}</code>"))
    facts += [("Note", escape(note)) for note in report.notes]
    return facts


def _text(source: str, tokens: int) -> str:
    named = {"default": "trtc's own text", "model": "text that the model wrote itself"}
    return f"{named.get(source, source)}, {tokens:,} tokens"


def short_expert(name: str) -> str:
    """`model.layers.3.mlp.experts.5` -> `layer 3 expert 5`."""
    parts = name.split(".")
    return f"layer {parts[parts.index('layers') + 1]} expert {parts[-1]}"


def starved_note(experts: Sequence[str]) -> str:
    """A note that names experts which calibration text hardly reached, the first of many."""
    named = ", ".join(short_expert(name) for name in experts[:_MAX_NAMED])
    more = f" and {len(experts) - _MAX_NAMED} more" if len(experts) > _MAX_NAMED else ""
    return (
        f"{len(experts)} experts that the calibration text hardly reached were calibrated on all "
        f"tokens of their layer: {named}{more}"
    )


def summary(report: Report) -> RenderableType:
    """The report for a terminal."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column()
    for name, value in _summary_rows(report):
        table.add_row(name, value)
    layers = report.accuracy.layers if report.accuracy is not None else ()
    if not find_sites(layers):
        return table
    return Group(table, Text(), *_terminal_map(layers))


def _summary_rows(report: Report) -> list[tuple[str, Text]]:
    scheme, accuracy = report.scheme, report.accuracy
    rows = [
        ("model", Text(f"{report.model.name} ({count(report.model.num_parameters)} parameters)")),
        ("scheme", Text(f"{scheme.name}, KV cache {scheme.kv_dtype}")),
        ("target", Text(report.target.name)),
        (
            "weights",
            Text(f"{size(_weights_bytes(report))}, {_beside_bf16(report)}"),
        ),
        (
            "KV cache",
            Text(f"{size(report.ledger.page)} a page of {report.kv.page_size} tokens"),
        ),
    ]
    if scheme.formats:
        rows.append(("formats", Text(counted_formats(scheme.formats))))
    if scheme.kept:
        rows.append(("kept in bf16", Text(f"{len(scheme.kept)} linears")))
    if report.target.tp > 1:
        weights = size(report.ledger.weights)
        rows.append(("ranks", Text(f"{report.target.tp} GPUs, each with {weights} of weights")))
    if accuracy is None:
        return rows
    rows.append(("measured on", Text(_measured(accuracy))))
    before = accuracy.reference_perplexity
    compared = f" ({before:.3f} before)" if before is not None else ""
    rows.append(("perplexity", Text(f"{accuracy.perplexity:.3f}{compared}")))
    if accuracy.kl is not None and accuracy.top1 is not None:
        rows.append(("KL", Text(f"{accuracy.kl:.4f} nats a token, {verdict(accuracy.kl)}")))
        rows.append(("top-1", Text(f"{100 * accuracy.top1:.1f} % the same")))
    worst = sorted(accuracy.layers, key=lambda e: (e.sqnr_db, e.layer))[:_WORST_IN_TERMINAL]
    if worst:
        noisiest = "; ".join(f"{short_name(e.layer)} {e.sqnr_db:.1f} dB" for e in worst)
        rows.append(("noisiest", Text(noisiest)))
    return rows


def _measured(accuracy: AccuracyFacts) -> str:
    """What was measured, and on which text."""
    return f"{accuracy.measured_on}: {_text(accuracy.text, accuracy.tokens)}"


def _terminal_map(layers: Sequence[LayerError]) -> list[Text]:
    """A line a kind of linear, a block a layer."""
    sites, colours = find_sites(layers), ramp(DARK_RAMP)
    num_layers = max(site.layer for site in sites) + 1
    share = -(-num_layers // _MAP_COLUMNS)
    lines = []
    for kind in KINDS:
        worst: dict[int, float] = {}
        for site in sites:
            if site.kind == kind:
                column = site.layer // share
                worst[column] = min(worst.get(column, site.error.sqnr_db), site.error.sqnr_db)
        if worst:
            line = Text(f"{kind:>8}  ")
            for column in range(-(-num_layers // share)):
                shade = SHADES.shade(worst[column]) if column in worst else None
                if shade is None:
                    line.append("  ")
                else:
                    # Density says what colour says, for terminals and logs without colours.
                    block = _BLOCKS[shade * len(_BLOCKS) // len(colours)]
                    line.append(2 * block, style=colours[shade])
            lines.append(line)
    lines.append(Text(f"{'':>8}  denser is noisier: {SHADES.low:g} to {SHADES.high:g} dB", "dim"))
    return lines
