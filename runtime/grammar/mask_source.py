"""Masks of one request's sequences, from a compiled grammar.

    output ids so far -> the matcher that has read most of them -> reads the rest -> mask

A matcher goes on where it was: a token costs one step of it. What it has read is part of its entry,
so an answer depends on the argument alone, whatever was asked before: a sequence that forks, is
computed anew or takes back drafts finds a matcher to roll back, or reads from the beginning.
"""

import threading
from collections.abc import Collection, Sequence

import numpy as np
from llguidance import LLMatcher

from trtc.runtime.grammar.trial import refused
from trtc.runtime.requests.grammar import Grammar
from trtc.runtime.sampling.masks import pack_mask


class _State:
    """A matcher and the tokens that it has read."""

    def __init__(self, matcher: LLMatcher, read: list[int]) -> None:
        self.matcher = matcher
        self.read = read

    def shared(self, output: list[int]) -> int:
        """Tokens at the beginning of `output` that it has read."""
        most = min(len(self.read), len(output))
        if self.read[:most] == output[:most]:
            return most
        return next(at for at in range(most) if self.read[at] != output[at])


class GrammarMasks:
    """The masks of one request (implements TokenMasks)."""

    def __init__(
        self,
        grammar: Grammar,
        matcher: LLMatcher,
        vocab_size: int,
        eos_token_ids: Collection[int],
        num_sequences: int,
    ) -> None:
        """
        Args:
            matcher: at the beginning; it is copied.
            num_sequences: that ask; as many matchers are kept.
        """
        self._grammar = grammar
        self._first = matcher
        self._ends = frozenset(eos_token_ids)
        ended = np.zeros(vocab_size, np.bool_)
        ended[list(eos_token_ids)] = True
        self._ended = pack_mask(ended)
        self._most = num_sequences
        self._lock = threading.Lock()
        self._idle: list[_State] = []

    def allowed(self, output_ids: Sequence[int]) -> bytes:
        """The mask of the token after `output_ids`; end-of-sequence tokens are in it where the
        grammar may end.

        Raises:
            InvalidRequestError: the mask goes over a limit; or the grammar does not allow what it
                is asked about.
        """
        output = list(output_ids)
        state, shared = self._take(output)
        rest = output[shared:]
        if not self._ends.isdisjoint(rest):
            self._give_back(state)
            return self._ended  # the sequence goes on beyond its end
        matcher = state.matcher
        if rest and not matcher.consume_tokens(rest):
            raise self._failure(matcher)
        state.read += rest
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            raise self._failure(matcher)
        self._give_back(state)
        return mask[: len(self._ended)]  # llguidance may have a word more

    def _take(self, output: list[int]) -> tuple[_State, int]:
        """A state for this thread alone, and how much of `output` it has read."""
        with self._lock:
            known = [(one.shared(output), one) for one in self._idle]
            shared, best = max(known, key=lambda one: one[0], default=(0, None))
            if best is not None and shared == len(best.read):
                self._idle.remove(best)
                return best, shared
            if best is None or len(self._idle) < self._most:
                return _State(self._first.deep_copy(), []), 0
            self._idle.remove(best)
        if best.matcher.rollback(len(best.read) - shared):
            del best.read[shared:]
            return best, shared
        return _State(self._first.deep_copy(), []), 0

    def _give_back(self, state: _State) -> None:
        with self._lock:
            self._idle.append(state)
            del self._idle[: -self._most]

    def _failure(self, matcher: LLMatcher) -> Exception:
        said = matcher.get_error().split("\n")[0][:300]
        return refused(self._grammar, f"cannot be kept to any longer ({said})")
