"""The model of `chat` and `run`: an engine in this process, or one of a server's."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from trtc.commands.completion import Completer
from trtc.commands.options import together
from trtc.commands.remote import connection_options, credentials
from trtc.protos.errors import RequestError, UnavailableError
from trtc.runtime.client import Client
from trtc.runtime.frontends.local import LocalEngine
from trtc.runtime.host.interpreter import quick_start
from trtc.runtime.requests.model_info import ModelInfo

LOCAL_SERVER = "127.0.0.1:8001"

model_options = together(
    click.option(
        "--url",
        metavar="HOST:PORT",
        help=f"The server that has NAME. Default: {LOCAL_SERVER}, unless NAME is a directory.",
    ),
    connection_options,
    click.option("--threads", type=click.IntRange(1), help="CPU threads of an engine directory."),
    click.option("--kv-bytes", type=click.IntRange(1), help="Bytes of its KV pool."),
)


@dataclass(frozen=True)
class OpenModel:
    completer: Completer
    info: ModelInfo
    name: str
    """What requests call it; "": it is the only one."""


@contextmanager
def open_model(
    name: str,
    *,
    url: str | None,
    threads: int | None,
    kv_bytes: int | None,
    **access: Any,
) -> Iterator[OpenModel]:
    """The model that NAME and `model_options` name, opened.

    Args:
        name: of a directory or of a server's model; "": the server's only one.

    Raises:
        RequestError: the options contradict each other, or there is neither engine nor server.
        TrtcError: the engine cannot be opened, or the server refuses.
    """
    if url is None and name and Path(name).is_dir():
        with quick_start():
            engine = LocalEngine.open(name, num_threads=threads, kv_bytes=kv_bytes)
        with engine:
            yield OpenModel(engine, engine.info(), "")
        return
    _check_absent(threads=threads, kv_bytes=kv_bytes)
    with Client(url or LOCAL_SERVER, **credentials(**access)) as client:
        info = _ask(client, name, is_default=url is None)
        yield OpenModel(client, info, info.name)


def _check_absent(**given: object) -> None:
    for option, value in given.items():
        if value is not None:
            raise RequestError(
                "is for an engine directory; a server has its own",
                field=f"--{option.replace('_', '-')}",
                remedy="Leave it out",
            )


def _ask(client: Client, name: str, *, is_default: bool) -> ModelInfo:
    try:
        models = client.info(name)
    except UnavailableError as error:
        if not (is_default and name):
            raise
        raise RequestError(
            f"{name} is no directory, and no server is reached at {client.address}",
            field="NAME",
            remedy="Give an engine directory, or start `trtc serve`, or give --url",
        ) from error
    if len(models) != 1:
        raise RequestError(
            f"the server has {len(models)} models",
            field="NAME",
            remedy=f"Choose one of: {', '.join(sorted(one.name for one in models))}",
        )
    return models[0]
