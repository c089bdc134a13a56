"""A compiled grammar, compiled several times if its masks are computed in parallel.

A copy of an `LLMatcher` shares the lexer of its original, under a lock, so masks of copies are
computed one after another, whatever the number of threads. So a grammar that several requests use
concurrently is compiled again, up to once for each thread.
"""

import threading
from collections.abc import Callable
from typing import NamedTuple
from weakref import WeakSet

from llguidance import LLMatcher

from trtc.runtime.grammar.mask_source import GrammarMasks


class _Original(NamedTuple):
    """A compiled matcher, and the requests that use copies of it."""

    matcher: LLMatcher
    users: "WeakSet[GrammarMasks]"


class CompiledGrammar:
    """Thread-safe."""

    def __init__(self, compiled: Callable[[], LLMatcher], most: int) -> None:
        """
        Args:
            compiled: compiles the grammar; an error of the first call is raised here.
            most: most times that it is compiled.
        """
        self._compile = compiled
        self._most = most
        self._lock = threading.Lock()
        self._originals = [_Original(compiled(), WeakSet())]

    @property
    def is_ready(self) -> bool:
        """Whether the next request needs no compilation."""
        with self._lock:
            return not self._is_short()

    def masks(self, of: Callable[[LLMatcher], GrammarMasks]) -> GrammarMasks:
        """The masks of a request; `of` is called with the matcher to copy."""
        with self._lock:
            is_short = self._is_short()
        added = _Original(self._compile(), WeakSet()) if is_short else None
        with self._lock:
            if added is not None and len(self._originals) < self._most:
                self._originals.append(added)
            original = min(self._originals, key=lambda one: len(one.users))
            masks = of(original.matcher)
            original.users.add(masks)
        return masks

    def _is_short(self) -> bool:
        return len(self._originals) < self._most and all(one.users for one in self._originals)
