"""The interface by which a build runs its engine, without importing the runtime.

The caller of the pipeline passes a probe; builder and runtime share only files.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from trtc.protos.grammars import StoredGrammar
from trtc.protos.manifest import Canary

Int32s = NDArray[np.int32]
Float32s = NDArray[np.float32]


class EngineProbe(Protocol):
    """Runs an engine directory on this machine."""

    def check_tokenizer(self, directory: Path) -> tuple[str, ...]:
        """Try a checkpoint's tokenizer and chat template; notes on what an engine cannot use.

        Raises:
            CheckpointError: the tokenizer does not work.
        """
        ...

    def check_grammars(
        self, directory: Path, vocab_size: int, grammars: Mapping[str, StoredGrammar]
    ) -> None:
        """Compile grammars over a checkpoint's tokenizer, in processes with limits.

        Raises:
            RequestError: one cannot be compiled; `field` is its name.
        """
        ...

    def logits(self, engine: Path, sequences: Sequence[Int32s]) -> Iterator[Float32s]:
        """Logits [len, vocab] of every position of every sequence, one sequence at a time."""
        ...

    def canaries(
        self, engine: Path, prompts: Sequence[Sequence[int]], max_tokens: int
    ) -> Iterator[Canary]:
        """Each prompt with its likeliest continuation and the margins, one prompt at a time; an
        end-of-sequence token does not stop it."""
        ...
