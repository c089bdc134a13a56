"""What the scheduler decides about one step."""

from typing import NamedTuple

from trtc.runtime.scheduling.prefix_cache import Node
from trtc.runtime.scheduling.sequence import Sequence


class Chunk(NamedTuple):
    """Tokens that a sequence computes in the step."""

    sequence: Sequence
    start: int
    """Position of the first token."""
    num_tokens: int
    num_samples: int
    """Tokens to draw after the last token; 0: the chunk does not reach the end of the sequence."""
    num_scored: int = 0
    """How many of its first tokens need logits, for the log-probabilities of the prompt."""
    num_drafts: int = 0
    """How many of its last tokens are drafts. Each token before a draft draws a token as well."""


class Scored(NamedTuple):
    """Prompt tokens whose log-probabilities a step gives."""

    sequence: Sequence
    row: int
    """Logit row of the first token."""
    position: int
    """Position of the first token in the prompt."""
    num_tokens: int


class Admission(NamedTuple):
    """A waiting sequence that starts to run."""

    sequence: Sequence
    matched: list[Node]
    """Pages found in the prefix cache."""


class StepPlan(NamedTuple):
    """What the next step does; valid until the state changes. Without chunks it does nothing."""

    preempted: tuple[Sequence, ...] = ()
    secured: tuple[Sequence, ...] = ()
    """Decodes that get new pages for their token."""
    admissions: tuple[Admission, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    """Decodes, then prefills, then admissions. The logit rows of a chunk are those of its scored
    tokens or of the tokens before drafts, then one for each sample."""
    scores: bool = False
    """Whether any chunk has scored tokens."""
    preempts_for_fairness: bool = False
    """Whether a sequence is preempted for a client that has none running."""
    has_drafts: bool = False
    kept: tuple[Sequence, ...] = ()
    """Sequences that keep the state before their last token, because its draw may be discarded."""

    def scored(self) -> list[Scored]:
        """Scored tokens of the sequences that have not ended since the step was planned."""
        found, row = [], 0
        for sequence, start, _, num_samples, num_scored, num_drafts in (
            self.chunks if self.scores else ()
        ):
            if num_scored and sequence.lanes:
                found.append(Scored(sequence, row, start + 1, num_scored))
            row += num_scored + num_drafts + num_samples
        return found
