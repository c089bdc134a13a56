"""`trtc quantize`: a checkpoint becomes a quantised one that other engines read too."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trtc.commands.phases import phases
from trtc.protos.errors import RequestError
from trtc.quant.calibrate import CalibrationFacts, quantize_checkpoint
from trtc.quant.output import check_output, new_directory
from trtc.quant.scheme import BUILDABLE, SCHEMES, scheme_named

SCHEME_NAMES = tuple(name for name in BUILDABLE if SCHEMES[name].modelopt is not None)
KV_DTYPES: dict[str, Literal["bf16", "f8e4m3"]] = {"bf16": "bf16", "fp8": "f8e4m3"}
_WORST_LAYERS = 5


@click.command()
@click.option("--model", required=True, help="Checkpoint directory, or a name on the hub.")
@click.option(
    "--output", required=True, type=click.Path(path_type=Path), help="Directory to write."
)
@click.option("--dtype", required=True, metavar="SCHEME", help=f"One of {', '.join(SCHEME_NAMES)}.")
@click.option(
    "--kv-dtype",
    metavar="TYPE",
    default="bf16",
    show_default=True,
    help="Type that the KV cache is to have: bf16, or fp8, which adds its scales.",
)
@click.option(
    "--calib",
    type=click.Path(path_type=Path),
    help="Calibration text (.jsonl or plain). Default: text that ships with trtc.",
)
@click.option("--force", is_flag=True, help="Replace a quantised checkpoint that is at --output.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(
    model: str,
    output: Path,
    dtype: str,
    kv_dtype: str,
    calib: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Quantise a checkpoint into a unified Hugging Face checkpoint.

    `trtc build --model` takes the result, and so do vLLM, SGLang and TensorRT-LLM.
    """
    from trtc.builder.checkpoint.resolve import resolve_model

    scheme = scheme_named(dtype)
    if dtype not in SCHEME_NAMES:
        raise RequestError(
            f"{dtype} is nothing to quantise to",
            field="--dtype",
            remedy=f"Use one of {', '.join(SCHEME_NAMES)}",
        )
    if kv_dtype not in KV_DTYPES:
        raise RequestError(
            f"is {kv_dtype!r}", field="--kv-dtype", remedy=f"Use one of {', '.join(KV_DTYPES)}"
        )
    check_output(output, force=force)
    model_dir = resolve_model(model)
    with phases() as progress, new_directory(output, force=force) as directory:
        facts = quantize_checkpoint(
            model_dir, scheme, KV_DTYPES[kv_dtype], calib, directory, progress
        )
    if as_json:
        click.echo(json.dumps({"output": str(output), "dtype": dtype, **_document(facts)}))
        return
    console = Console()
    console.print(_table(facts))
    console.print(f"wrote {escape(str(output))}", highlight=False)


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
