"""`trtc inspect`: what an engine is made of. Loads no code and no weights."""

from pathlib import Path

import click
from rich.console import Console

from trtc.commands.engine_table import accuracy_table, engine_table, plan_lines
from trtc.protos.errors import RequestError
from trtc.protos.manifest import PLAN_FILE, read_manifest
from trtc.protos.plan import read_plan
from trtc.runtime.verify import verify_files


@click.command()
@click.argument("engine", type=click.Path(path_type=Path))
@click.option("--plan", is_flag=True, help="Show every kernel call and where its tensors are.")
@click.option("--json", "as_json", is_flag=True, help="Print the manifest, or the plan, as JSON.")
@click.option("--verify", is_flag=True, help="Hash every file and compare with the manifest.")
def command(engine: Path, plan: bool, as_json: bool, verify: bool) -> None:
    """Show what an engine is made of."""
    manifest = read_manifest(engine)
    if verify:
        verify_files(engine, manifest)
    if plan and PLAN_FILE not in manifest.files:
        raise RequestError(f"a {manifest.target.kind} engine has no plan", field="--plan")
    if as_json:
        text = (engine / PLAN_FILE).read_bytes() if plan else manifest.to_json()
        click.echo(text.decode(), nl=False)
        return
    if plan:
        for line in plan_lines(read_plan(engine / PLAN_FILE)):
            click.echo(line)
        return
    console = Console()
    console.print(engine_table(engine, manifest))
    if manifest.accuracy is not None:
        console.print(accuracy_table(manifest.accuracy))
    if verify:
        console.print(f"{len(manifest.files)} files match the manifest", highlight=False)
