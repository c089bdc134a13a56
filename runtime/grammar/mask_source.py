"""Masks of one request's sequences, from a compiled grammar.

    output ids so far -> the matcher that has read most of them -> reads the rest -> mask

A matcher continues from its last state, so a token costs one step. Its entry has the tokens that it
has read, so the result depends on the argument only: for a sequence that forks, is recomputed or
rolls back drafts, a matcher is rolled back, or reads from the beginning.
"""

import threading
import time
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
from llguidance import LLMatcher

from trtc.runtime.grammar.trial import refused
from trtc.runtime.requests.grammar import Grammar
from trtc.runtime.requests.token_masks import MaskAnswerer, MaskQuery
from trtc.runtime.sampling.masks import pack_mask

SLOW_S = 0.005
"""Seconds after which a mask is late for most steps."""


class State:
    """A matcher and the tokens that it has read."""

    __slots__ = ("lexer", "matcher", "read")

    def __init__(self, matcher: LLMatcher, read: list[int], lexer: int) -> None:
        self.matcher = matcher
        self.read = read
        self.lexer = lexer
        """The same number for matchers that share a lexer."""

    def shared(self, output: list[int]) -> int:
        """Number of leading tokens of `output` that it has read."""
        most = min(len(self.read), len(output))
        if self.read[:most] == output[:most]:
            return most
        return next(at for at in range(most) if self.read[at] != output[at])


class Reading(NamedTuple):
    """The work for the mask of one sequence's next token."""

    state: State
    """Exclusive to the caller until it is given back; a failed one must be dropped."""
    rest: Sequence[int]
    """Tokens that the matcher has to read first."""
    drafts: Sequence[int] = ()
    """Tokens after each of which the mask is computed as well; none of them ends a sequence."""


class GrammarMasks:
    """The masks of one request (implements TokenMasks and JointMasks)."""

    def __init__(
        self,
        grammar: Grammar,
        matcher: LLMatcher,
        vocab_size: int,
        eos_token_ids: Collection[int],
        num_sequences: int,
        answerer: MaskAnswerer,
    ) -> None:
        """
        Args:
            matcher: in its initial state; it is copied, and copies share its lexer.
            num_sequences: number of sequences, and of matchers that are kept.
            answerer: computes masks of many requests together, those of this one by `take`.
        """
        self._grammar = grammar
        self.original = matcher
        self._ends = frozenset(eos_token_ids)
        ended = np.zeros(vocab_size, np.bool_)
        ended[list(eos_token_ids)] = True
        self.ended = pack_mask(ended)
        """The mask of a sequence that continues past its end."""
        self._most = num_sequences
        self._answerer = answerer
        self._lock = threading.Lock()
        self._idle: list[State] = []
        self.is_slow = False
        """Whether the last mask was slow, so that the next ones are computed separately, until one
        is fast."""

    @property
    def answerer(self) -> MaskAnswerer | None:
        return None if self.is_slow else self._answerer

    @property
    def takes_drafts(self) -> bool:
        return True

    def allowed(self, output_ids: Sequence[int]) -> bytes:
        """The mask of the token after `output_ids`; it has end-of-sequence tokens where the grammar
        may end.

        Raises:
            InvalidRequestError: the mask exceeds a limit, or the grammar does not allow
                `output_ids`.
        """
        begin = time.perf_counter()
        reading = self.take(list(output_ids))
        if reading is None:
            return self.ended
        state, rest = reading.state, reading.rest
        if rest and not state.matcher.consume_tokens(list(rest)):
            raise self.failure(state)
        state.read += rest
        mask = state.matcher.compute_bitmask()
        if state.matcher.is_error():
            raise self.failure(state)
        self.give_back(state)
        self.is_slow = time.perf_counter() - begin > SLOW_S
        return mask[: len(self.ended)]  # llguidance may have a word more

    def take(self, output: list[int]) -> Reading | None:
        """A state to continue `output` from; None: `output` is past the end."""
        state, shared = self._nearest(output)
        rest = output[shared:]
        if self._ends.isdisjoint(rest):
            return Reading(state, rest)
        self.give_back(state)
        return None

    def take_for(self, query: MaskQuery) -> Reading | None:
        """As `take`, of a query's output. The query keeps the state from one output to the
        next, so that what it has read is not compared again."""
        drafts = query.drafts and self._before_end(query.drafts)
        state = query.memo
        if not isinstance(state, State):
            reading = self.take(list(query.output_ids))
            if reading is None:
                return None
            query.memo = reading.state
            return reading._replace(drafts=drafts)
        rest = query.new_ids
        if len(state.read) + len(rest) != query.num_output:
            rest = query.output_from(len(state.read))
        if self._ends.isdisjoint(rest):
            return Reading(state, rest, drafts)
        self.take_back(query)
        return None

    def take_back(self, query: MaskQuery) -> None:
        """Give back the state that a query keeps."""
        state, query.memo = query.memo, None
        if isinstance(state, State):
            self.give_back(state)

    def _before_end(self, drafts: Sequence[int]) -> Sequence[int]:
        ends = (at for at, token in enumerate(drafts) if token in self._ends)
        return drafts[: next(ends, len(drafts))]

    def give_back(self, state: State) -> None:
        with self._lock:
            self._idle.append(state)
            del self._idle[: -self._most]

    def failure(self, state: State) -> Exception:
        """The error of a state whose matcher has failed."""
        said = state.matcher.get_error().split("\n")[0][:300]
        return refused(self._grammar, f"cannot be kept to any longer ({said})")

    def _nearest(self, output: list[int]) -> tuple[State, int]:
        """A state, exclusive to this thread, and how many tokens of `output` it has read."""
        with self._lock:
            known = [(one.shared(output), one) for one in self._idle]
            shared, best = max(known, key=lambda one: one[0], default=(0, None))
            if best is not None and shared == len(best.read):
                self._idle.remove(best)
                return best, shared
            if best is None or len(self._idle) < self._most:
                return State(self.original.deep_copy(), [], id(self.original)), 0
            self._idle.remove(best)
        if best.matcher.rollback(len(best.read) - shared):
            del best.read[shared:]
            return best, shared
        return State(self.original.deep_copy(), [], id(self.original)), 0
