"""`trtc serve` in a process of its own, for the time of a block."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from examples.bench.peers.processes import Command, Server, free_port, http_ok, serving


@dataclass(frozen=True)
class TrtcServer:
    """Where it answers, and its process."""

    address: str
    """gRPC."""
    http_port: int
    server: Server
    model: str = ""
    """Name of its only engine."""

    @property
    def metrics_url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}/metrics"


@contextmanager
def trtc_server(engine: Path, *options: str) -> Iterator[TrtcServer]:
    """A server of one engine on free ports of loopback, from when it is ready until SIGTERM.

    Raises:
        RunFailed: it ended, or was not ready in time.
    """
    with _serving(str(engine), *options) as server:
        yield replace(server, model=engine.name)


@contextmanager
def trtc_models(models: Path, *options: str) -> Iterator[TrtcServer]:
    """The same of a directory of models."""
    with _serving("--models", str(models), *options) as server:
        yield server


@contextmanager
def _serving(*arguments: str) -> Iterator[TrtcServer]:
    port, http_port = free_port(), free_port()
    command: Command = [sys.executable, "-m", "trtc", "serve", *arguments]
    command += ["--grpc-port", str(port), "--http-port", str(http_port)]
    with serving(command, lambda: http_ok(http_port, "/readyz")) as server:
        yield TrtcServer(f"127.0.0.1:{port}", http_port, server)
