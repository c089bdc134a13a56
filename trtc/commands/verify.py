"""`trtc verify`: is an engine whole, and who vouches for it?"""

import json
from pathlib import Path

import click

from trtc.protos.manifest import read_manifest
from trtc.runtime.integrity.verify import verify_files


@click.command()
@click.argument("engine", type=click.Path(path_type=Path))
@click.option(
    "--trust",
    type=click.Path(path_type=Path),
    metavar="KEYS",
    help="Also verify the signature: a PEM public key, or a directory of them.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(engine: Path, trust: Path | None, as_json: bool) -> None:
    """Compare all files of ENGINE with its manifest, and its signature with trusted keys."""
    if trust is None:
        manifest = read_manifest(engine)
    else:
        from trtc.runtime.integrity.signature import signed_manifest, trusted_keys

        manifest = signed_manifest(engine, trusted_keys(trust))
    verify_files(engine, manifest)
    if as_json:
        facts = {
            "digest": manifest.digest,
            "files": len(manifest.files),
            "signed": trust is not None,
        }
        click.echo(json.dumps(facts))
        return
    click.echo(f"{len(manifest.files)} files match the manifest, digest {manifest.digest}")
    if trust is None:
        click.echo("no signature was verified: give --trust KEYS")
    else:
        click.echo(f"a key of {trust} has signed it")
