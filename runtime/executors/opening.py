"""How an engine of one kind is opened: the contract between session.py and the kinds of engine.

    check the machine -> size the pool -> verify the files -> open

`runtime/engine/session.py` does the second and third step the same way for every kind.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, Protocol

from trtc.protos.manifest import Manifest
from trtc.runtime.executors.base import Bytes, Executor
from trtc.runtime.integrity.engine_files import FileIdentity


class OpenRequest(NamedTuple):
    """An engine, and the options of opening it."""

    engine: Path
    manifest: Manifest
    num_threads: int | None
    """CPU threads; None: the physical cores that this process may use."""
    dummy_weights: bool
    quick_start: bool = False
    """Whether to defer work until after the first token."""
    found: Mapping[str, FileIdentity] = MappingProxyType({})
    """Identities of files when their hashing began; empty: any content is accepted."""
    verify: bool = True
    """Whether code is hashed while it is loaded, and compared with the manifest."""
    weights: Bytes | None = None
    """Verified weights in host memory (`Executor.weights_on_host`); None: those of the engine's
    files."""


class Opening(Protocol):
    """An engine that is compatible with this machine and not loaded yet."""

    @property
    def files(self) -> tuple[str, ...]:
        """Files that `open` will load; the manifest must list each, so that it is verified."""
        ...

    @property
    def pool_share(self) -> float:
        """Share of `free_bytes` for a pool without a given size."""
        ...

    @property
    def max_pages(self) -> int | None:
        """Pages of the largest pool that the engine supports; None: no limit."""
        ...

    def free_bytes(self) -> int:
        """Device memory that weights and activations leave for the KV pool."""
        ...

    def close(self) -> None:
        """Release resources of an engine that will not be opened."""
        ...

    def open(self, num_pages: int) -> Executor:
        """Load the engine; called once, after its files have been verified.

        Raises:
            EngineError: the files contradict each other.
            EnvironmentFault: the device refuses, or memory is too small.
        """
        ...


Prepare = Callable[[OpenRequest], Opening]
"""Checks that the engine fits this machine.

Raises:
    EngineIncompatibleError: the engine is for another machine; names the field.
    EnvironmentFault: a library, a driver or a device is missing.
"""
