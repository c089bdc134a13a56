"""What the scheduler decides about one step."""

from dataclasses import dataclass
from typing import NamedTuple

from trtc.runtime.prefix_cache import Node
from trtc.runtime.sequence import Sequence


class Chunk(NamedTuple):
    """Tokens that a sequence computes in the step."""

    sequence: Sequence
    start: int
    """Position of the first."""
    num_tokens: int
    num_samples: int
    """Tokens to draw after the last one; 0: more of the sequence remains to be computed."""


class Admission(NamedTuple):
    """A waiting sequence that starts to run."""

    sequence: Sequence
    matched: list[Node]
    """Pages found in the prefix cache."""


@dataclass(frozen=True)
class StepPlan:
    """What the next step does; valid until the state changes. Without chunks it does nothing."""

    preempted: tuple[Sequence, ...] = ()
    admissions: tuple[Admission, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    """Decodes, then prefills, then the admitted."""

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)
