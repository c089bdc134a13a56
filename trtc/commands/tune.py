"""`trtc tune`: a CUDA engine's tactics measured on the GPU at hand, and kept in the engine."""

import hashlib
import json
from contextlib import closing
from pathlib import Path

import click
import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from trtc.commands.phases import phases
from trtc.protos.errors import OutputError, UnsupportedError
from trtc.protos.launch_plan import TacticTable, tactics_file
from trtc.protos.manifest import MANIFEST_FILE, TACTICS_PREFIX, FileFacts, Manifest, read_manifest
from trtc.protos.record import record_json
from trtc.protos.staging import claim_directory, replace_files


@click.command()
@click.argument("engine", type=click.Path(path_type=Path))
@click.option("--dummy-weights", is_flag=True, help="Fill in random weights.")
@click.option("--json", "as_json", is_flag=True, help="Print the tactics as one JSON document.")
def command(engine: Path, dummy_weights: bool, as_json: bool) -> None:
    """Measure with which kernels ENGINE's steps are fastest on this GPU, and keep that in ENGINE.

    Without it an engine uses the table that trtc was made with. Tuning again replaces what was
    found before; results change by rounding only.
    """
    manifest = read_manifest(engine)
    if manifest.target.kind != "cuda":
        raise UnsupportedError(
            f"is {manifest.target.kind}, and only CUDA engines have tactics to measure",
            field="manifest.json: target.kind",
            remedy="Build it with --target cuda:sm_90",
        )
    if manifest.target.tp > 1:
        raise UnsupportedError(
            f"is {manifest.target.tp}, and tactics are measured on one GPU",
            field="manifest.json: target.tp",
            remedy="Serve it as it is: it uses the table that trtc was made with",
        )
    with claim_directory(engine):
        table = _measure(engine, dummy_weights)
        store(engine, manifest, table)
    if as_json:
        click.echo(json.dumps(msgspec.to_builtins(table)))
    else:
        _show(engine, table)


def _measure(engine: Path, dummy_weights: bool) -> TacticTable:
    from trtc.runtime.engine.session import open_session
    from trtc.runtime.executors.cuda.executor import CudaExecutor
    from trtc.runtime.executors.cuda.opening import device_name
    from trtc.runtime.executors.cuda.tuning import tune

    with phases() as progress:
        progress(f"opening {engine}")
        executor = open_session(engine, dummy_weights=dummy_weights).executor
        assert isinstance(executor, CudaExecutor), executor
        with closing(executor):
            return tune(executor, device_name(), progress)


def store(engine: Path, manifest: Manifest, table: TacticTable) -> Manifest:
    """Write the table beside the old one, then a manifest that lists it, then drop the old one:
    the engine is whole at every moment.

    Raises:
        OutputError: the engine cannot be written to.
    """
    content = record_json(table)
    name = tactics_file(content)
    files = {old: f for old, f in manifest.files.items() if not old.startswith(TACTICS_PREFIX)}
    facts = FileFacts(sha256=hashlib.sha256(content).hexdigest(), bytes=len(content))
    sealed = msgspec.structs.replace(manifest, files={**files, name: facts}).sealed()
    try:
        replace_files(
            engine,
            {name: content, MANIFEST_FILE: sealed.to_json()},
            removed=sorted(manifest.files.keys() - sealed.files.keys()),
        )
    except OSError as error:
        raise OutputError(
            f"cannot be written to ({error.strerror})",
            field=str(engine),
            remedy="Tune a copy, or make it writable",
        ) from error
    return sealed


def _show(engine: Path, table: TacticTable) -> None:
    console = Console()
    if not table.tactics:
        console.print(f"{engine} on {table.device}: nothing is faster than what it had")
        return
    shown = Table(box=box.SIMPLE, title=f"{engine} on {table.device}")
    for heading in ("calls", "steps", "rows", "a step before", "now"):
        shown.add_column(heading, justify="left" if heading in ("calls", "steps") else "right")
    for one in table.tactics:
        more = f" and {len(one.sites) - 1} more" if len(one.sites) > 1 else ""
        shown.add_row(
            f"{one.sites[0]}{more}",
            one.kind,
            str(one.rows),
            f"{one.default_microseconds:.1f} µs",
            f"{one.microseconds:.1f} µs",
        )
    console.print(shown)
