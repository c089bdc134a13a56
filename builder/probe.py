"""How a build runs the engine that it has just made, without importing the runtime.

Whoever calls the pipeline hands in a probe; builder and runtime go on meeting on disk only.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Int32s = NDArray[np.int32]
Float32s = NDArray[np.float32]


class EngineProbe(Protocol):
    """Runs an engine directory on this machine."""

    def logits(self, engine: Path, sequences: Sequence[Int32s]) -> Iterator[Float32s]:
        """Logits [len, vocab] of every position of every sequence, one sequence at a time."""
        ...

    def greedy(self, engine: Path, prompt_ids: Sequence[int], max_tokens: int) -> tuple[int, ...]:
        """The likeliest continuation, without a stop at an end-of-sequence token."""
        ...
