"""Which engines a process opens, and how."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from trtc.runtime.engine.drafting import DraftConfig
from trtc.runtime.engine.handle import EngineHandle
from trtc.runtime.requests.request_defaults import GenerationConfig

if TYPE_CHECKING:
    from trtc.runtime.executors.weights import KeptWeights


@dataclass(frozen=True)
class EngineSource:
    name: str
    path: Path
    digest: str = ""
    """Of the only manifest that may be served; "": any."""
    version: str = "1"
    """Of those of its name."""
    weights: "KeptWeights | None" = field(default=None, compare=False, repr=False)
    """In the host's memory, of an earlier time; None: those of the files."""


@dataclass(frozen=True)
class EngineConfig:
    """How an engine is opened and run, whatever the protocol of its requests."""

    max_queue: int = 1024
    """Requests that may wait."""
    prefix_cache: bool = True
    step_target_s: float = 0.17
    """Seconds that a step should take at most while sequences decode; 0: no limit."""
    drafts: DraftConfig | None = None
    """Speculative decoding; None: off."""
    num_threads: int | None = None
    kv_bytes: int | None = None
    """Bytes of KV pool; None: what the session chooses."""
    kv_host_bytes: int = 0
    """Host memory for pages that the prefix cache evicts; 0: evicted pages are lost."""
    kv_events: bool = False
    """Whether there is a log of what is cached and evicted."""
    dummy_weights: bool = False
    trust: Path | None = None
    """Public keys, of which one must have signed the engine; None: no signature is needed."""
    generation_config: GenerationConfig = "model"
    """Whose sampling defaults requests get."""


Opener = Callable[[EngineSource, EngineConfig], EngineHandle]
"""Opens one engine and starts its loop; blocks."""
