"""`trtc generate`: one completion from an engine in this process."""

from pathlib import Path

import click

from trtc.commands.completion import complete, completion_options
from trtc.runtime.engine import LocalEngine
from trtc.runtime.interpreter import quick_start


@click.command()
@click.argument("engine", type=click.Path(path_type=Path))
@completion_options
@click.option("--threads", type=click.IntRange(1), help="CPU threads.")
@click.option("--kv-bytes", type=click.IntRange(1), help="Bytes of KV pool.")
@click.option(
    "--dummy-weights", is_flag=True, help="Fill an engine built without weights with random ones."
)
def command(
    engine: Path, threads: int | None, kv_bytes: int | None, dummy_weights: bool, **options: object
) -> None:
    """Complete a prompt with ENGINE, in this process."""

    def open_engine() -> LocalEngine:
        with quick_start():
            return LocalEngine.open(
                engine, num_threads=threads, kv_bytes=kv_bytes, dummy_weights=dummy_weights
            )

    complete(open_engine, **options)
