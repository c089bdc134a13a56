"""Tokenizers and grammars of servers in one process, which share what takes long to make: processes
that render chats, processes that try grammars, and a trie of the tokens."""

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from trtc.runtime.grammar.grammars import Grammars
from trtc.runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from trtc.runtime.grammar.trial import GrammarTrials

_MOST_KEPT = 4
"""Processes of what is dropped end when nothing refers to it."""


def shared_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer of these files, which nobody closes."""
    files = sorted((one.name, one.stat()) for one in directory.iterdir())
    return _loaded(directory, tuple((name, stat.st_mtime_ns, stat.st_size) for name, stat in files))


class SharingGrammars(Grammars):
    """An engine's grammars. It has its own masks and compiled grammars."""

    def _tokens(self) -> "LLTokenizer":
        assert self._tokenizer is not None
        return _trie(self._tokenizer, self._vocab_size, self._eos_token_ids)

    def _tried(self) -> "GrammarTrials":
        assert self._tokenizer is not None
        return _trials(self._tokenizer, self._eos_token_ids)


@lru_cache(_MOST_KEPT)
def _loaded(directory: Path, files: tuple[tuple[str, int, int], ...]) -> Tokenizer:
    return Tokenizer.load(directory)


@lru_cache(_MOST_KEPT)
def _trie(tokenizer: Tokenizer, vocab_size: int, end_token_ids: tuple[int, ...]) -> "LLTokenizer":
    from trtc.runtime.grammar.vocabulary import trie_of

    return trie_of(tokenizer, vocab_size, end_token_ids)


@lru_cache(_MOST_KEPT)
def _trials(tokenizer: Tokenizer, end_token_ids: tuple[int, ...]) -> "GrammarTrials":
    from trtc.runtime.grammar.trial import GrammarTrials

    return GrammarTrials(token_ids=tokenizer.added_tokens, end_token_ids=end_token_ids)
