"""The grammars of one engine: compiled once, kept while there is room.

Grammar -> trial, in a limited process -> compile, over the tokenizer's trie -> masks
"""

import threading
from collections import OrderedDict
from collections.abc import Collection
from typing import TYPE_CHECKING

from trtc.protos.errors import InvalidRequestError
from trtc.runtime.requests.grammar import Grammar, check_size

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from trtc.runtime.grammar.mask_computer import MaskComputer
    from trtc.runtime.grammar.mask_source import GrammarMasks
    from trtc.runtime.grammar.trial import GrammarTrials
    from trtc.runtime.text.tokenizer import Tokenizer

MAX_KEPT = 128
"""Compiled grammars of an engine."""


class Grammars:
    """Compiles grammars, from any thread. Nothing is made before the first one is wanted."""

    def __init__(
        self, tokenizer: "Tokenizer | None", vocab_size: int, eos_token_ids: Collection[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._lock = threading.Lock()
        self._trie_lock = threading.Lock()
        self._trie: LLTokenizer | None = None
        self._trials: GrammarTrials | None = None
        self._computer: MaskComputer | None = None
        self._kept: OrderedDict[tuple[str, str], LLMatcher] = OrderedDict()

    def check(self, grammar: Grammar) -> None:
        """What can be said of a grammar at once.

        Raises:
            InvalidRequestError: it is too large; or the engine has no tokenizer, or no token that
                ends a sequence.
        """
        check_size(grammar)
        if self._tokenizer is None or not self._eos_token_ids:
            lacks = "tokenizer" if self._tokenizer is None else "end-of-sequence token"
            raise InvalidRequestError(
                f"this engine has no {lacks}", field=grammar.field, remedy="Leave it out"
            )

    def masks(self, grammar: Grammar, num_sequences: int) -> "GrammarMasks":
        """The masks of a request. The first time of a grammar, it is compiled: that may take
        seconds.

        Raises:
            InvalidRequestError: see `check` and `GrammarTrials.run`.
            UnavailableError: closed.
            EnvironmentFault: grammars cannot be tried on this machine.
        """
        from trtc.runtime.grammar.mask_source import GrammarMasks

        matcher = self._kept_one(grammar) or self._compile(grammar)
        return GrammarMasks(
            grammar,
            matcher,
            self._vocab_size,
            self._eos_token_ids,
            num_sequences,
            self._computing(),
        )

    def close(self) -> None:
        """End the processes that try grammars, and compute no more masks. Idempotent."""
        with self._lock:
            if self._trials is not None:
                self._trials.close()
            if self._computer is not None:
                self._computer.close()

    def is_kept(self, grammar: Grammar) -> bool:
        """Whether it need not be compiled."""
        return (grammar.kind, grammar.text) in self._kept

    def _kept_one(self, grammar: Grammar) -> "LLMatcher | None":
        key = (grammar.kind, grammar.text)
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
            return found

    def _compile(self, grammar: Grammar) -> "LLMatcher":
        from llguidance import LLMatcher

        from trtc.runtime.grammar.notation import parser_limits
        from trtc.runtime.grammar.trial import refused

        self.check(grammar)
        source = self._tried().run(grammar)
        matcher = LLMatcher(self._tokens(), source, log_level=0, limits=parser_limits())
        matcher.compute_bitmask()  # what the first mask finds out is the same for every request
        if matcher.is_error():
            problem = " ".join(matcher.get_error().split())[:300]
            raise refused(grammar, f"cannot be compiled: {problem}")
        with self._lock:
            self._kept[grammar.kind, grammar.text] = matcher
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return matcher

    def _tried(self) -> "GrammarTrials":
        from trtc.runtime.grammar.trial import GrammarTrials

        with self._lock:
            if self._trials is None:
                assert self._tokenizer is not None
                self._trials = GrammarTrials(
                    token_ids=self._tokenizer.added_tokens, end_token_ids=self._eos_token_ids
                )
            return self._trials

    def _computing(self) -> "MaskComputer":
        from trtc.runtime.grammar.mask_computer import MaskComputer

        with self._lock:
            if self._computer is None:
                self._computer = MaskComputer(self._vocab_size)
            return self._computer

    def _tokens(self) -> "LLTokenizer":
        from trtc.runtime.grammar.vocabulary import trie_of

        assert self._tokenizer is not None
        with self._trie_lock:
            if self._trie is None:
                self._trie = trie_of(self._tokenizer, self._vocab_size, self._eos_token_ids)
            return self._trie
