"""`trtc client`: one completion from a running server."""

from pathlib import Path

import click

from trtc.commands.completion import complete, completion_options
from trtc.commands.remote import connection_options, credentials
from trtc.runtime.client import Client


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Where the server is.")
@click.option("--port", type=click.IntRange(1, 65535), default=8001, show_default=True)
@click.option("--model", default="", help="Engine name; may be left out when there is one.")
@completion_options
@click.option(
    "--priority",
    type=int,
    default=0,
    help="Larger is sooner; a server grants up to its --max-priority.",
)
@click.option("--timeout", type=click.FloatRange(0, min_open=True), help="Seconds in all.")
@connection_options
def command(
    host: str,
    port: int,
    timeout: float | None,
    tls: bool,
    tls_ca: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    api_key_file: Path | None,
    **options: object,
) -> None:
    """Complete a prompt with a running server, as `trtc generate` does in this process."""
    access = credentials(
        tls=tls, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key, api_key_file=api_key_file
    )
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    complete(lambda: Client(address, timeout=timeout, **access), **options)
