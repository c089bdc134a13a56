"""An engine's manifest and plan as tables for a terminal."""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
from rich.markup import escape
from rich.table import Table

from trtc.protos.grammars import StoredGrammar
from trtc.protos.manifest import AccuracyFacts, Manifest
from trtc.protos.plan import Argument, Plan
from trtc.protos.units import count, size

_WORST_LAYERS = 3


def engine_table(path: Path, manifest: Manifest) -> Table:
    """What an engine is, needs and costs."""
    model, scheme, kv = manifest.model, manifest.scheme, manifest.kv
    limits, ledger = manifest.limits, manifest.ledger
    on_disk = sum(facts.bytes for facts in manifest.files.values())
    table = Table(title=escape(str(path)), show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    ranks = manifest.target.tp
    each = " on each GPU" if ranks > 1 else ""
    for name, value in (
        ("model", f"{model.name} ({model.architecture}, {count(model.num_parameters)} parameters)"),
        *([("revision", model.revision)] if model.revision else []),
        ("scheme", f"{scheme.name}, {_origin(manifest)}"),
        *([("formats", _formats(manifest))] if scheme.formats else []),
        ("target", f"{manifest.target.name}, {manifest.target.toolchain}"),
        *([("ranks", manifest.target.parallelism)] if ranks > 1 else ()),
        (
            "limits",
            f"{limits.max_batch_size} sequences of {limits.max_seq_len} tokens, "
            f"{limits.max_num_tokens} tokens a step",
        ),
        ("weights", size(ledger.weights) + each + (" (dummy)" if manifest.dummy_weights else "")),
        ("activations", size(ledger.activations) + each),
        (
            "KV pool",
            f"{manifest.scheme.kv_dtype}, pages of {kv.page_size} tokens, "
            f"{size(ledger.page)} a page, "
            f"{size(ledger.page * kv.pages_of_sequence(limits.max_seq_len))} a full sequence{each}",
        ),
        ("tokenizer", "yes" if manifest.has_tokenizer else "no: token ids only"),
        ("format", manifest.format_name),
        ("sampling", _sampling_defaults(manifest)),
        ("canaries", _canaries(manifest)),
        ("on disk", f"{size(on_disk)} in {len(manifest.files) + 1} files"),
        ("digest", manifest.digest),
    ):
        table.add_row(name, escape(value))
    return table


def grammars_table(grammars: Mapping[str, StoredGrammar]) -> Table:
    """The grammars that requests may name."""
    table = Table(title="grammars", title_justify="left", box=None)
    for column in ("name", "kind", "from", "size"):
        table.add_column(column)
    for name, one in sorted(grammars.items()):
        table.add_row(name, one.kind, escape(one.source), size(len(one.text.encode())))
    return table


def provenance_lines(manifest: Manifest) -> list[str]:
    """What an engine was made of and by."""
    provenance = manifest.provenance
    if provenance is None:
        return []
    packages = ", ".join(f"{name} {version}" for name, version in provenance.packages.items())
    options = " ".join(f"{name}={value}" for name, value in provenance.options.items())
    return [
        *(f"from {name} sha256:{digest}" for name, digest in provenance.checkpoint.items()),
        f"by {packages}",
        f"with {options or 'defaults'}",
    ]


def accuracy_table(accuracy: AccuracyFacts) -> Table:
    """What quantisation cost."""
    table = Table(
        title=f"accuracy on {accuracy.tokens} held-out tokens, by {accuracy.measured_on}",
        title_justify="left",
        box=None,
    )
    table.add_column("")
    table.add_column("engine", justify="right")
    table.add_column("unquantised", justify="right")
    reference = accuracy.reference_perplexity
    table.add_row(
        "perplexity", f"{accuracy.perplexity:.3f}", "" if reference is None else f"{reference:.3f}"
    )
    if accuracy.kl is not None and accuracy.top1 is not None:
        table.add_row("KL (nats a token)", f"{accuracy.kl:.5f}", "")
        table.add_row("top-1 agreement", f"{accuracy.top1:.2%}", "")
    worst = sorted(accuracy.layers, key=lambda layer: layer.sqnr_db)[:_WORST_LAYERS]
    for layer in worst:
        table.add_row(escape(f"noisiest: {layer.layer}"), f"{layer.sqnr_db:.1f} dB", "")
    return table


def plan_lines(plan: Plan) -> Iterator[str]:
    """Every kernel call with its sizes, and where its tensors are."""
    places = {buffer.name: buffer.offset for buffer in plan.buffers}
    places |= {weight.name: weight.offset for weight in plan.weights}
    yield (
        f"{len(plan.calls)} calls, {size(plan.arena_bytes)} of activations, "
        f"{len(plan.weights)} weights of {size(plan.weights_bytes)}"
    )
    for number, call in enumerate(plan.calls):
        sizes = " ".join(f"{name}={value}" for name, value in call.axes.items())
        attributes = " ".join(f"{name}={_short(v)}" for name, v in call.attributes.items())
        yield ""
        yield f"{number:4} {call.operator:16} {call.site}"
        yield f"     {sizes}  {attributes}".rstrip()
        for argument in call.arguments:
            yield f"       {argument.parameter:14} {_argument(argument, places)}"


def _argument(argument: Argument, places: Mapping[str, int]) -> str:
    where = {
        "buffer": "arena",
        "weight": "weights",
        "step": "step",
        "pool": "pool",
        "logits": "output",
    }[argument.kind]
    place = f"@{places[argument.name]}" if argument.name in places else ""
    columns = ""
    if argument.kind == "buffer" and argument.row_stride > argument.columns:
        columns = f"[:, {argument.column_offset}:{argument.column_offset + argument.columns}]"
    return f"{argument.dtype:7} {where + place:18} {argument.name}{columns}"


def _short(value: float | str) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _canaries(manifest: Manifest) -> str:
    prompts = f"{len(manifest.canaries)} prompts"
    tolerance = manifest.canary_tolerance
    return f"{prompts}, ties below {tolerance:g} logits" if tolerance else prompts


def _sampling_defaults(manifest: Manifest) -> str:
    """What requests get that do not say, from the model's generation_config.json."""
    given = msgspec.structs.asdict(manifest.model.sampling_defaults)
    shown = [f"{name} {value:g}" for name, value in given.items() if value is not None]
    return ", ".join(shown) or "no defaults of the model"


def _formats(manifest: Manifest) -> str:
    """How many sites each format has; `inspect --json` names them."""
    counts = Counter(manifest.scheme.formats.values())
    return ", ".join(f"{name} {number}" for name, number in sorted(counts.items())) + " sites"


def _origin(manifest: Manifest) -> str:
    scheme = manifest.scheme
    if scheme.source != "inline":
        return f"from a {scheme.source} checkpoint"
    if scheme.calibration_sha256 is not None:
        return f"calibrated on text {scheme.calibration_sha256[:12]}"
    return "nothing to calibrate"
