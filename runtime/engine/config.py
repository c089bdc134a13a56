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
    """Digest that the manifest must have; "": any."""
    version: str = "1"
    """Version of the model of this name."""
    weights: "KeptWeights | None" = field(default=None, compare=False, repr=False)
    """Weights kept in host memory from an earlier session; None: load them from the files."""


@dataclass(frozen=True)
class EngineConfig:
    """How an engine is opened and run, independent of protocols."""

    max_queue: int = 1024
    """Most requests that wait."""
    prefix_cache: bool = True
    step_target_s: float = 0.17
    """Seconds that a step should take at most while sequences decode; 0: no limit."""
    drafts: DraftConfig | None = None
    """Speculative decoding; None: off."""
    num_threads: int | None = None
    kv_bytes: int | None = None
    """Bytes of the KV pool; None: the session chooses."""
    kv_host_bytes: int = 0
    """Bytes of host memory for pages that the prefix cache evicts; 0: no host tier."""
    kv_events: bool = False
    """Whether to log which pages are cached and evicted."""
    dummy_weights: bool = False
    trust: Path | None = None
    """Public keys, one of which must have signed the engine; None: no signature is needed."""
    generation_config: GenerationConfig = "model"
    """Source of the sampling defaults: the model or the runtime."""


Opener = Callable[[EngineSource, EngineConfig], EngineHandle]
"""Opens one engine and starts its loop; blocks."""
