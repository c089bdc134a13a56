"""A directory of engines that echo, and servers of such directories."""

import gc
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from tests.support.servers import CONFIG, EOS, EchoEngine, RunningServer, manifest, open_echo
from trtc.protos.errors import EngineUntrustedError, EnvironmentFault
from trtc.protos.manifest import MANIFEST_FILE, Canary, read_manifest
from trtc.runtime.engine.config import EngineConfig, EngineSource
from trtc.runtime.engine.handle import EngineHandle
from trtc.runtime.executors.echo import EchoExecutor, EchoOptions
from trtc.runtime.executors.weights import KeptWeights
from trtc.runtime.server.app import RepositoryConfig, Server, ServerConfig

STEP_S = 0.002
FAULT = ".fault"
"""A file in an engine's directory: it cannot be opened."""
NO_WEIGHTS = ".no-weights"
"""The same: its weights cannot be had."""


def options_of(vocab_size: int) -> EchoOptions:
    """Engines of other vocabularies give other tokens."""
    return EchoOptions(vocab_size=vocab_size, num_pages=512, step_s=STEP_S, never=(EOS,))


def add_engine(path: Path, vocab_size: int = 512, canaries: Sequence[Canary] = ()) -> Path:
    """Write an engine's directory, or another manifest into one, at once as `trtc build` does."""
    echo = EchoEngine(options_of(vocab_size), canaries=tuple(canaries))
    path.mkdir(parents=True, exist_ok=True)
    draft = path / ".manifest"
    draft.write_bytes(manifest(echo, EchoExecutor(echo.options)).to_json())
    draft.replace(path / MANIFEST_FILE)
    return path


def open_from(source: EngineSource, config: EngineConfig) -> EngineHandle:
    """The engine of a directory, as `opening.open_handle` opens one."""
    found = read_manifest(source.path)
    if source.digest not in ("", found.digest):
        raise EngineUntrustedError("is another engine")
    if (source.path / FAULT).exists():
        raise EnvironmentFault("it cannot be opened now")
    kept = source.weights or KeptWeights(np.zeros(1000, np.uint8), found.digest, None)
    assert kept.are_of(found.digest, None)
    echo = EchoEngine(options_of(found.model.vocab_size), canaries=found.canaries)
    engine = open_echo(echo, source.name, config)
    keep = None if (source.path / NO_WEIGHTS).exists() else lambda: kept
    return msgspec.structs.replace(
        engine, version=source.version, manifest=found, keep_weights=keep
    )


@asynccontextmanager
async def repository_server(
    root: Path,
    *,
    poll_s: float | None = None,
    load: Sequence[str] = (),
    config: ServerConfig = CONFIG,
) -> AsyncIterator[RunningServer]:
    """A started server; on the way out it drains and must leave nothing behind.

    Each model that goes is followed by a collection of garbage, which does not visit the million
    objects of the libraries that tests import."""
    gc.freeze()  # until the end of the test: tests/conftest.py
    repository = RepositoryConfig(root, poll_s, tuple(load))
    config = replace(config, engines=(), repository=repository)
    server = Server(config, opener=open_from)
    try:
        await server.start()
        yield RunningServer(server)
    finally:
        await server.close()
