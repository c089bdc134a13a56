"""`trtc sign`: a signature beside an engine's manifest."""

from pathlib import Path

import click

from trtc.protos.manifest import read_manifest
from trtc.runtime.integrity.signature import sign_engine
from trtc.runtime.integrity.verify import verify_files


@click.command()
@click.argument("engine", type=click.Path(path_type=Path))
@click.option(
    "--key",
    type=click.Path(path_type=Path),
    required=True,
    help="PEM of an elliptic-curve private key (P-256, P-384, P-521), without a password.",
)
def command(engine: Path, key: Path) -> None:
    """Sign ENGINE, when all its files match its manifest.

    The signature, manifest.sig, is an OpenSSF model-signing bundle of manifest.json, which holds
    the hash of every other file. Whatever changes the manifest later (compile, tune) ends it.
    """
    manifest = read_manifest(engine)
    verify_files(engine, manifest)
    click.echo(f"wrote {sign_engine(engine, key)} for digest {manifest.digest}")
