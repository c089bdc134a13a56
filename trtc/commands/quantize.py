"""`trtc quantize`: a checkpoint becomes a quantised one that other engines read too."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trtc.builder.tables import TABLE_OPTIONS
from trtc.commands.checkpoint_options import calibration_options, model_options
from trtc.commands.phases import phases
from trtc.commands.values import one_of
from trtc.protos.errors import RequestError, UnsupportedError
from trtc.protos.outputs import new_directory, refuse_occupied
from trtc.quant.calibration_facts import CalibrationFacts
from trtc.quant.keep import parse_keep
from trtc.quant.recipe import FormatRecipe, read_recipe
from trtc.quant.record import CHECKPOINT, write_record
from trtc.quant.scheme import BUILDABLE, MIXED, SCHEMES, Scheme, scheme_named
from trtc.quant.site_format import BF16
from trtc.version import __version__

_UNPUBLISHED = "iq4"
"""Weights that no checkpoint layout of others holds."""
SCHEME_NAMES = tuple(
    name
    for name in BUILDABLE
    if SCHEMES[name].calibration is not None and SCHEMES[name].weight != _UNPUBLISHED
)
KV_DTYPES: dict[str, Literal["bf16", "f8e4m3"]] = {"bf16": "bf16", "fp8": "f8e4m3"}
_WORST_LAYERS = 5
_ROTATED = (
    "a reader has to apply transform_config of config.json to activations; Transformers (5.23) "
    "ignores it and computes nonsense"
)


@click.command()
@model_options
@click.option(
    "--output", required=True, type=click.Path(path_type=Path), help="Directory to write."
)
@click.option(
    "--dtype",
    metavar="SCHEME",
    shell_complete=one_of(SCHEME_NAMES),
    help=f"One of {', '.join(SCHEME_NAMES)}. Needed unless --recipe is given.",
)
@click.option(
    "--kv-dtype",
    metavar="TYPE",
    shell_complete=one_of(tuple(KV_DTYPES)),
    default="bf16",
    show_default=True,
    help="Type that the KV cache is to have: bf16, or fp8, which adds its scales.",
)
@calibration_options
@click.option("--force", is_flag=True, help="Replace a quantised checkpoint that is at --output.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(
    model: str,
    revision: str | None,
    output: Path,
    dtype: str | None,
    kv_dtype: str,
    calib: str | None,
    recipe: Path | None,
    keep: tuple[str, ...],
    force: bool,
    as_json: bool,
) -> None:
    """Quantise a checkpoint into one that `trtc build --model` takes, and other servers too.

    int4 and its like are in compressed-tensors' layout, which Transformers, vLLM and SGLang read;
    other schemes in nvidia-modelopt's, which vLLM, SGLang and TensorRT-LLM read.
    """
    from trtc.builder.checkpoint.resolve import hub_commit, resolve_model
    from trtc.builder.checkpoint.tokenizer_conversion import with_fast_tokenizer
    from trtc.quant.calibrate import quantize_checkpoint

    scheme = _scheme(dtype, recipe, keep)
    name = MIXED if isinstance(scheme, FormatRecipe) else scheme.name
    if kv_dtype not in KV_DTYPES:
        raise RequestError(
            f"is {kv_dtype!r}", field="--kv-dtype", remedy=f"Use one of {', '.join(KV_DTYPES)}"
        )
    globs = parse_keep(keep)
    refuse_occupied(output, CHECKPOINT, force=force)
    found = resolve_model(model, revision)
    with (
        with_fast_tokenizer(found) as readable,
        phases() as progress,
        new_directory(output, CHECKPOINT, force=force) as directory,
    ):
        facts = quantize_checkpoint(
            readable,
            scheme,
            KV_DTYPES[kv_dtype],
            calib,
            directory,
            progress,
            keep=globs,
        )
        record = {
            "revision": hub_commit(found),
            "scheme": name,
            "kv_dtype": KV_DTYPES[kv_dtype],
            **_document(facts),
        }
        write_record(directory, __version__, record)
    if as_json:
        click.echo(json.dumps({"output": str(output), "dtype": name, **_document(facts)}))
        return
    console = Console()
    console.print(_table(facts))
    console.print(f"wrote {escape(str(output))}", highlight=False)
    if isinstance(scheme, Scheme) and scheme.hadamard:
        console.print(f"note: {_ROTATED}", highlight=False)


def _scheme(dtype: str | None, recipe: Path | None, keep: tuple[str, ...]) -> Scheme | FormatRecipe:
    if recipe is not None:
        for field, value in (("--dtype", dtype), ("--keep", keep or None)):
            if value is not None:
                raise RequestError(
                    "says how linears are stored, and so does --recipe",
                    field=field,
                    remedy="Leave one of the two out",
                )
        found = read_recipe(recipe)
        for site, one in found.formats.items():
            if one.weight == _UNPUBLISHED:
                raise _unpublished(one.name, f"--recipe: {site}")
        for table, name in found.tables.names.items():
            if name != BF16.name:
                raise _built_only(table, name)
        return found
    if dtype is None:
        raise RequestError(
            "is missing", field="--dtype", remedy="Give one, or a recipe with --recipe"
        )
    scheme = scheme_named(dtype)
    if scheme.weight == _UNPUBLISHED:
        raise _unpublished(dtype, "--dtype")
    if dtype not in SCHEME_NAMES:
        raise RequestError(
            f"{dtype} is nothing to quantise to",
            field="--dtype",
            remedy=f"Use one of {', '.join(SCHEME_NAMES)}",
        )
    return scheme


def _unpublished(name: str, field: str) -> UnsupportedError:
    return UnsupportedError(
        f"no checkpoint layout that other engines read has {name} weights",
        field=field,
        remedy=f"Give {name} to trtc build, or use int4_g32",
    )


def _built_only(table: str, name: str) -> UnsupportedError:
    return UnsupportedError(
        f"a checkpoint keeps this table in bf16, and the recipe says {name}",
        field=f"--recipe: {table}",
        remedy=f"Leave it out, and build the checkpoint with trtc build {TABLE_OPTIONS[table]} "
        f"{name}",
    )


def _document(facts: CalibrationFacts) -> dict[str, Any]:
    layers = [
        {"layer": e.layer, "sqnr_db": e.sqnr_db, "max_abs_error": e.max_abs_error}
        for e in facts.layers
    ]
    return {**asdict(facts), "layers": layers}


def _table(facts: CalibrationFacts) -> Table:
    """The linears that quantisation hurt most."""
    table = Table(
        title=f"calibrated on {facts.tokens} tokens; the noisiest of {len(facts.layers)} linears",
        title_justify="left",
        box=None,
    )
    table.add_column("linear")
    table.add_column("signal to noise", justify="right")
    table.add_column("largest error", justify="right")
    for error in sorted(facts.layers, key=lambda e: (e.sqnr_db, e.layer))[:_WORST_LAYERS]:
        table.add_row(escape(error.layer), f"{error.sqnr_db:.1f} dB", f"{error.max_abs_error:.3g}")
    return table
