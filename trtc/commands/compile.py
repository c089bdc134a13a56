"""`trtc compile`: a TensorRT bundle becomes a plan, on the machine that will run it."""

from pathlib import Path

import click
from rich.console import Console

from trtc.commands.engine_table import engine_table
from trtc.commands.phases import phases


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the manifest instead of a table.")
def command(bundle: Path, as_json: bool) -> None:
    """Compile BUNDLE, written by `trtc build --target tensorrt:sm_90`, into its model.plan.

    Needs TensorRT 11 and the GPU that the bundle is for. A timing cache is kept in the bundle and
    used again.
    """
    from trtc.builder.targets.tensorrt_compile import compile_bundle

    with phases() as progress:
        manifest = compile_bundle(bundle, progress)
    if as_json:
        click.echo(manifest.to_json().decode(), nl=False)
    else:
        Console().print(engine_table(bundle, manifest))
