"""`trtc inspect`: what an engine is made of. Loads no code and no weights."""

from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape

from trtc.commands.engine_table import (
    accuracy_table,
    engine_table,
    grammars_table,
    plan_lines,
    provenance_lines,
)
from trtc.commands.stages_lines import stages_lines
from trtc.protos.errors import RequestError
from trtc.protos.grammars import read_grammars
from trtc.protos.manifest import PLAN_FILE, Manifest, read_manifest
from trtc.protos.plan import read_plan
from trtc.protos.record import record_json
from trtc.protos.stages import STAGES_FILE, read_stages
from trtc.runtime.integrity.verify import verify_files


@click.command()
@click.argument("engine", type=click.Path(path_type=Path))
@click.option("--plan", is_flag=True, help="Show every call of a step and where its tensors are.")
@click.option("--json", "as_json", is_flag=True, help="Print the manifest, or the plan, as JSON.")
@click.option("--verify", is_flag=True, help="Hash every file and compare with the manifest.")
def command(engine: Path, plan: bool, as_json: bool, verify: bool) -> None:
    """Show what an engine is made of."""
    manifest = read_manifest(engine)
    if verify:
        verify_files(engine, manifest)
    if plan:
        _show_plan(engine, manifest, as_json=as_json)
        return
    if as_json:
        click.echo(manifest.to_json().decode(), nl=False)
        return
    console = Console()
    console.print(engine_table(engine, manifest))
    if manifest.accuracy is not None:
        console.print(accuracy_table(manifest.accuracy))
    grammars = read_grammars(engine, manifest)
    if grammars:
        console.print(grammars_table(grammars))
    for line in provenance_lines(manifest):
        console.print(escape(line), highlight=False, soft_wrap=True)
    if verify:
        console.print(f"{len(manifest.files)} files match the manifest", highlight=False)


def _show_plan(engine: Path, manifest: Manifest, *, as_json: bool) -> None:
    """A CPU engine's kernel calls, or the stages of an engine of TensorRT plans."""
    name = next((one for one in (PLAN_FILE, STAGES_FILE) if one in manifest.files), None)
    if name is None:
        raise RequestError(f"a {manifest.target.kind} engine has no plan", field="--plan")
    if name == STAGES_FILE:
        stages = read_stages(engine)
        text, lines = record_json(stages), stages_lines(stages)
    else:
        plan = read_plan(engine / name)
        text, lines = plan.to_json(), plan_lines(plan)
    if as_json:
        click.echo(text.decode(), nl=False)
        return
    for line in lines:
        click.echo(line)
