"""`trtc compile`: a TensorRT bundle becomes a plan, on the machine that will run it."""

from pathlib import Path

import click
from rich.console import Console

from trtc.commands.engine_table import engine_table
from trtc.commands.phases import phases


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--strip/--no-strip",
    default=True,
    show_default=True,
    help="Leave the weights out of the plan; they are taken from the bundle when it is opened.",
)
@click.option(
    "--alias-pools",
    is_flag=True,
    help="Declare to TensorRT that KV pools are written in place.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the manifest instead of a table.")
def command(bundle: Path, strip: bool, alias_pools: bool, as_json: bool) -> None:
    """Compile BUNDLE, written by `trtc build --target tensorrt:sm_90`, into its model.plan.

    Needs TensorRT 11 and the GPU that the bundle is for. A timing cache is kept in the bundle and
    used again.
    """
    from trtc.builder.targets.tensorrt.compile import CompileOptions, compile_bundle

    options = CompileOptions(strip=strip, alias_pools=alias_pools)
    with phases() as progress:
        manifest = compile_bundle(bundle, progress, options)
    if as_json:
        click.echo(manifest.to_json().decode(), nl=False)
    else:
        Console().print(engine_table(bundle, manifest))
