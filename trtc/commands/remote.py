"""What the commands that talk to a server share: the options of a secure connection."""

from pathlib import Path

import click

from trtc.commands.options import together
from trtc.runtime.client import ClientTls

connection_options = together(
    click.option("--tls-ca", type=click.Path(path_type=Path), help="PEM roots to trust: use TLS."),
    click.option("--tls-cert", type=click.Path(path_type=Path), help="PEM certificate, for mTLS."),
    click.option("--tls-key", type=click.Path(path_type=Path), help="PEM key of --tls-cert."),
)


def client_tls(ca: Path | None, cert: Path | None, key: Path | None) -> ClientTls | None:
    """None: a plain connection."""
    return ClientTls(ca, cert, key) if ca or cert or key else None
