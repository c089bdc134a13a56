"""`trtc generate`: one completion from an engine in this process."""

from pathlib import Path

import click

from trtc.commands.completion import complete, completion_options
from trtc.runtime.frontends.local import LocalEngine
from trtc.runtime.host.interpreter import quick_start
from trtc.runtime.requests.request_defaults import GenerationConfig


@click.command()
@click.argument("engine", type=click.Path(path_type=Path))
@completion_options
@click.option("--threads", type=click.IntRange(1), help="CPU threads.")
@click.option("--kv-bytes", type=click.IntRange(1), help="Bytes of KV pool.")
@click.option(
    "--dummy-weights", is_flag=True, help="Fill an engine built without weights with random ones."
)
@click.option(
    "--generation-config",
    type=click.Choice(["model", "trtc"]),
    default="model",
    show_default=True,
    help="Sampling defaults of requests: of the model's generation_config.json, or trtc's own.",
)
def command(
    engine: Path,
    threads: int | None,
    kv_bytes: int | None,
    dummy_weights: bool,
    generation_config: GenerationConfig,
    **options: object,
) -> None:
    """Complete a prompt with ENGINE, in this process."""

    def open_engine() -> LocalEngine:
        with quick_start():
            return LocalEngine.open(
                engine,
                num_threads=threads,
                kv_bytes=kv_bytes,
                dummy_weights=dummy_weights,
                generation_config=generation_config,
            )

    complete(open_engine, **options)
