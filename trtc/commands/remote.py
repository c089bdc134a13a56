"""What the commands that talk to a server share: the options of a secure connection."""

import os
from pathlib import Path
from typing import TypedDict

import click

from trtc.commands.options import together
from trtc.protos.errors import RequestError
from trtc.protos.files import UnreadableError, read_file
from trtc.runtime.client import ClientTls

API_KEY_VARIABLE = "TRTC_API_KEY"
_MAX_KEY_FILE_BYTES = 4096

connection_options = together(
    click.option("--tls", is_flag=True, help="Use TLS, as each of the other --tls options does."),
    click.option(
        "--tls-ca",
        type=click.Path(path_type=Path),
        help="PEM roots to trust. Default: the public ones that gRPC carries.",
    ),
    click.option("--tls-cert", type=click.Path(path_type=Path), help="PEM certificate, for mTLS."),
    click.option("--tls-key", type=click.Path(path_type=Path), help="PEM key of --tls-cert."),
    click.option(
        "--api-key-file",
        type=click.Path(path_type=Path),
        help="File with the API key to send. Default: the environment variable "
        f"{API_KEY_VARIABLE}, where it is set.",
    ),
)


class Credentials(TypedDict):
    """Arguments of `Client` and `AsyncClient`."""

    tls: ClientTls | None
    api_key: str | None


def credentials(
    *,
    tls: bool,
    tls_ca: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    api_key_file: Path | None,
) -> Credentials:
    """What the options say.

    Raises:
        RequestError: the file of the key cannot be read.
    """
    files = (tls_ca, tls_cert, tls_key)
    return Credentials(
        tls=ClientTls(*files) if tls or any(files) else None, api_key=_api_key(api_key_file)
    )


def _api_key(path: Path | None) -> str | None:
    """A key on the command line would be seen by every user of the machine."""
    if path is None:
        return os.environ.get(API_KEY_VARIABLE) or None
    try:
        return read_file(path, _MAX_KEY_FILE_BYTES).decode().strip()
    except (UnreadableError, UnicodeDecodeError) as error:
        raise RequestError(
            f"{path}: {error}", field="--api-key-file", remedy="Give a file with the key alone"
        ) from error
