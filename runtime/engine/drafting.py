"""Drafts: tokens that a sequence is likely to draw next, so that a step can check several at once.

    known tokens d1 d2 d3    k + 1 rows; each draws the next token, as without drafts
                 t1 t2 t3 t4 t1 counts; t(i+1) counts if drafts d1 to di equal t1 to ti

A row's draw is a function of its logits, the request's seed and the output position. So drafts
change the number of steps and not the tokens, if a row's logits do not depend on the other rows of
the step. On GPUs they do, by rounding.
"""

from collections.abc import Sequence as Items
from typing import Literal, NamedTuple, Protocol

from trtc.protos.errors import RequestError, UnsupportedError
from trtc.protos.step import MAX_DRAFT_TOKENS
from trtc.runtime.executors.base import Executor
from trtc.runtime.sampling.sampler import Int32s
from trtc.runtime.scheduling.sequence import Sequence

_LONGEST, _SHORTEST = 4, 2
"""Lengths of the n-gram at the end that is searched for, longest first."""
_MAX_HISTORY = 1 << 14
"""Most recent tokens that are searched, which takes some ten microseconds."""
_MAX_PAUSE = 5
"""A sequence whose last m drafts were all rejected gets none for 2**m tokens; the largest m."""


class DraftConfig(NamedTuple):
    """Speculative decoding: which drafter proposes tokens, and how many."""

    method: Literal["ngram"] = "ngram"
    num_tokens: int = 4
    """Most drafts of a sequence in a step."""


class Drafter(Protocol):
    """Proposes drafts."""

    def propose(self, sequence: Sequence, history: Int32s, most: int) -> Items[int]:
        """At most `most` tokens that may follow `history`, all tokens of a sequence so far. Wrong
        proposals cost time and change no output."""
        ...


class NgramDrafter:
    """Proposes the tokens that followed an earlier occurrence of the last tokens: prompt lookup
    decoding (A. Saxena, 2023). Answers that quote their prompt, such as code, take fewer steps."""

    def propose(self, sequence: Sequence, history: Int32s, most: int) -> Items[int]:
        missed = sequence.num_missed_drafts
        pause = 1 << min(missed, _MAX_PAUSE) if missed else 0
        if sequence.num_output < sequence.drafted_at + pause:
            return ()
        return lookup(history[-_MAX_HISTORY:], most)


def drafter_of(config: DraftConfig, executor: Executor) -> Drafter:
    """The drafter that a config names, for an executor.

    Raises:
        UnsupportedError: the executor verifies no drafts.
        RequestError: the number is out of range.
    """
    if not 1 <= config.num_tokens <= MAX_DRAFT_TOKENS:
        raise RequestError(
            f"is {config.num_tokens}", field="draft_tokens", remedy=f"Give 1 to {MAX_DRAFT_TOKENS}"
        )
    if executor.draft_rows is None:
        raise UnsupportedError(
            "this engine checks no drafts",
            field="draft",
            remedy="Leave it out, or build the engine with a larger --max-batch-size",
        )
    return NgramDrafter()


def lookup(history: Int32s, most: int) -> list[int]:
    """The `most` tokens that followed the last earlier occurrence of the n-gram at the end, or
    none. If they reach the end of the history, they are repeated."""
    for length in range(min(_LONGEST, len(history) - 1), _SHORTEST - 1, -1):
        at = _last_place(history, length)
        if at is not None:
            period = len(history) - length - at
            behind = history[at + length : at + length + most].tolist()
            return [behind[step % period] for step in range(most)]
    return []


def _last_place(history: Int32s, length: int) -> int | None:
    """Index of the last earlier occurrence of the last `length` tokens; None: there is none."""
    tokens, size = history.tobytes(), history.itemsize
    wanted, end = tokens[-length * size :], len(tokens) - size
    while (at := tokens.rfind(wanted, 0, end)) >= 0:
        if at % size == 0:
            return at // size
        end = at + len(wanted) - 1  # the match began within a token's bytes
    return None
