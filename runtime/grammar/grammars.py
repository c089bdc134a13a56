"""The grammars of one engine: compiled once, kept while there is room.

Grammar -> trial, in a limited process -> compile, over the tokenizer's trie -> masks
"""

import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from msgspec.structs import replace

from trtc.protos.errors import (
    EnvironmentFault,
    InvalidRequestError,
    ServeError,
    UnavailableError,
)
from trtc.runtime.host.logs import logger
from trtc.runtime.requests.grammar import Grammar, check_size

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from trtc.runtime.grammar.compiled import CompiledGrammar
    from trtc.runtime.grammar.mask_computer import MaskComputer
    from trtc.runtime.grammar.mask_source import GrammarMasks
    from trtc.runtime.grammar.trial import GrammarTrials
    from trtc.runtime.text.tokenizer import Tokenizer

MAX_KEPT = 128
"""Most compiled grammars of an engine that are cached, besides its own."""
HEAD_START_S = 0.3
"""Seconds from an engine's start until its own grammars are compiled, so that the compilation does
not compete with the first token for the GIL."""


class Grammars:
    """Compiles grammars. Thread-safe. Nothing is initialised before the first one is needed."""

    def __init__(
        self,
        tokenizer: "Tokenizer | None",
        vocab_size: int,
        eos_token_ids: Collection[int],
        named: Mapping[str, Grammar] | None = None,
    ) -> None:
        """
        Args:
            named: the engine's own grammars, by name.
        """
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._lock = threading.Lock()
        self._trie_lock = threading.Lock()
        self._trie: LLTokenizer | None = None
        self._trials: GrammarTrials | None = None
        self._computer: MaskComputer | None = None
        self._kept: OrderedDict[tuple[str, str], CompiledGrammar] = OrderedDict()
        self._named = dict(named or {})
        self._ready: dict[str, CompiledGrammar] = {}
        """Compiled grammars of `_named`, which are never evicted."""
        self._preparing: threading.Thread | None = None
        self._closed = threading.Event()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the engine's own grammars."""
        return tuple(sorted(self._named))

    def prepare(self, engine: str) -> None:
        """Compile the engine's own grammars in a thread, so that no request waits for it. A failure
        is logged, and requests that use the grammar are refused.

        Args:
            engine: its name, for the log.
        """
        if self._named and self._tokenizer is not None and self._eos_token_ids:
            self._preparing = threading.Thread(
                target=self._prepare, args=(engine,), name="trtc-named-grammars", daemon=True
            )
            self._preparing.start()

    def _prepare(self, engine: str) -> None:
        self._closed.wait(HEAD_START_S)
        for name, grammar in self._named.items():
            if self._closed.is_set():
                return
            try:
                self._ready.setdefault(name, self._compile(grammar))
            except UnavailableError:
                return  # closed
            except (ServeError, EnvironmentFault) as error:
                logger("trtc.server").warning("engine=%s %s", engine, error)

    def check(self, grammar: Grammar) -> None:
        """Check a grammar without compiling it.

        Raises:
            InvalidRequestError: it is too large; or the engine has no tokenizer, or no token that
                ends a sequence; or no such grammar.
        """
        check_size(grammar)
        if grammar.kind == "named" and grammar.text not in self._named:
            raise InvalidRequestError(
                f"this engine has no grammar {grammar.text[:64]!r}",
                field=grammar.field,
                remedy=f"Give one of {', '.join(self.names)}" if self._named else "Leave it out",
            )
        if self._tokenizer is None or not self._eos_token_ids:
            lacks = "tokenizer" if self._tokenizer is None else "end-of-sequence token"
            raise InvalidRequestError(
                f"this engine has no {lacks}", field=grammar.field, remedy="Leave it out"
            )

    def masks(self, grammar: Grammar, num_sequences: int) -> "GrammarMasks":
        """The masks of a request. A grammar is compiled at its first use, which may take seconds,
        and again for concurrent requests (see `CompiledGrammar`).

        Raises:
            InvalidRequestError: see `check` and `GrammarTrials.run`.
            UnavailableError: closed.
            EnvironmentFault: the process for trials cannot be started.
        """
        from trtc.runtime.grammar.mask_source import GrammarMasks

        compiled = self._found(grammar) or self._compiled(grammar)
        return compiled.masks(
            lambda matcher: GrammarMasks(
                grammar,
                matcher,
                self._vocab_size,
                self._eos_token_ids,
                num_sequences,
                self._computing(),
            )
        )

    def close(self) -> None:
        """End the processes for trials, and stop computing masks. Idempotent."""
        self._closed.set()
        with self._lock:
            if self._trials is not None:
                self._trials.close()
            if self._computer is not None:
                self._computer.close()
        if self._preparing is not None:
            self._preparing.join()

    def is_kept(self, grammar: Grammar) -> bool:
        """Whether the grammar is cached."""
        if grammar.kind == "named":
            found = self._ready.get(grammar.text)
        else:
            found = self._kept.get((grammar.kind, grammar.text))
        return found is not None and found.is_ready

    def _found(self, grammar: Grammar) -> "CompiledGrammar | None":
        if grammar.kind == "named":
            return self._ready.get(grammar.text)
        key = (grammar.kind, grammar.text)
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
            return found

    def _compiled(self, grammar: Grammar) -> "CompiledGrammar":
        self.check(grammar)
        if grammar.kind == "named":
            of_engine = replace(self._named[grammar.text], sent_as=grammar.field)
            return self._ready.setdefault(grammar.text, self._compile(of_engine))
        compiled = self._compile(grammar)
        with self._lock:
            self._kept[grammar.kind, grammar.text] = compiled
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return compiled

    def _compile(self, grammar: Grammar) -> "CompiledGrammar":
        from trtc.runtime.grammar.compiled import CompiledGrammar
        from trtc.runtime.grammar.mask_computer import num_threads

        check_size(grammar)
        source = self._tried().run(grammar)
        return CompiledGrammar(lambda: self._matcher(grammar, source), num_threads())

    def _matcher(self, grammar: Grammar, source: str) -> "LLMatcher":
        from llguidance import LLMatcher

        from trtc.runtime.grammar.notation import parser_limits
        from trtc.runtime.grammar.trial import refused

        matcher = LLMatcher(self._tokens(), source, log_level=0, limits=parser_limits())
        matcher.compute_bitmask()  # the first mask fills caches that all requests share
        if matcher.is_error():
            problem = " ".join(matcher.get_error().split())[:300]
            raise refused(grammar, f"cannot be compiled: {problem}")
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
