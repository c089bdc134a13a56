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
    """An engine and how its user wants it run."""

    engine: Path
    manifest: Manifest
    num_threads: int | None
    """CPU threads; None: the physical cores that this process may use."""
    dummy_weights: bool
    quick_start: bool = False
    """Whether the first token comes before all that can wait until it has come."""
    found: Mapping[str, FileIdentity] = MappingProxyType({})
    """Files as they were when their hashing began; empty: any content is taken."""
    verify: bool = True
    """Whether code is hashed as it is loaded, so that what runs is what the manifest lists."""
    weights: Bytes | None = None
    """Verified ones that are in the host's memory (`Executor.weights_on_host`); None: those of the
    engine's files."""


class Opening(Protocol):
    """An engine that fits this machine, and of which nothing has been loaded."""

    @property
    def files(self) -> tuple[str, ...]:
        """What `open` will load: the manifest must list each, or it goes unverified."""
        ...

    @property
    def pool_share(self) -> float:
        """How much of `free_bytes` a pool takes whose size nobody gave."""
        ...

    @property
    def max_pages(self) -> int | None:
        """Of the largest pool that the engine takes; None: any."""
        ...

    def free_bytes(self) -> int:
        """Device memory that weights and activations leave for the KV pool."""
        ...

    def close(self) -> None:
        """Release what was made ready; for an engine that will not be opened."""
        ...

    def open(self, num_pages: int) -> Executor:
        """Load the engine; called once, when its files have been verified.

        Raises:
            EngineError: the files contradict each other.
            EnvironmentFault: the device refuses.
        """
        ...


Prepare = Callable[[OpenRequest], Opening]
"""Checks that the engine fits this machine.

Raises:
    EngineIncompatibleError: it is for another machine; the message names the field.
    EnvironmentFault: a library, a driver or a device is missing.
"""
