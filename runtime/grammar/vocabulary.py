"""The trie of a tokenizer's tokens, for llguidance."""

from collections.abc import Collection
from functools import cached_property, lru_cache

from llguidance import LLTokenizer, TokenizerWrapper

from trtc.runtime.text.tokenizer import Tokenizer

_BEFORE = "\x02"
"""Prefix of a text to encode, so that the tokenizer adds no leading space to the text."""

_SHORT = 64
"""Most bytes of texts whose tokens are cached: names and markers of a grammar recur in outputs."""
_MAX_KEPT = 4096


class _Tokens:
    """The tokenizer interface of llguidance."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: list[int]) -> None:
        known = range(min(vocab_size, tokenizer.vocab_size))
        # Ids that must not be drawn have no text: padding of the vocabulary, and gaps in it.
        self.tokens = [tokenizer.token_utf8(token) for token in known]
        self.tokens += [b""] * (vocab_size - len(self.tokens))
        special = {token for token in known if tokenizer.is_special(token)}
        self.special_token_ids = sorted(special.union(eos_token_ids))
        self.eos_token_id = eos_token_ids[0]
        self._special = frozenset(self.special_token_ids)
        self._tokenizer = tokenizer
        self._before = tokenizer.encode(_BEFORE, add_special_tokens=False)
        self._short = lru_cache(_MAX_KEPT)(self._encoded)

    def __call__(self, text: bytes) -> list[int]:
        """Tokens of a text that the grammar forces. Only these tokens are then allowed, so they
        must spell exactly the text. The threads that compute masks call it, serialised by the
        GIL."""
        return self._short(text) if len(text) <= _SHORT else self._encoded(text)

    def _encoded(self, text: bytes) -> list[int]:
        written = text.decode(errors="replace")
        ids = self._tokenizer.encode(_BEFORE + written, add_special_tokens=False)
        num_before = len(self._before)
        tokens = list(ids[num_before:])
        is_text = b"".join(self.tokens[one] for one in tokens) == text
        if is_text and ids[:num_before] == self._before and self._special.isdisjoint(tokens):
            return tokens
        return self._longest(text)

    def _longest(self, text: bytes) -> list[int]:
        """Greedy longest-match tokens, up to the first position without a token."""
        tokens, at = list[int](), 0
        while at < len(text):
            most = min(self._longest_token, len(text) - at)
            sizes = (size for size in range(most, 0, -1) if text[at : at + size] in self._ids)
            size = next(sizes, 0)
            if not size:
                break
            tokens.append(self._ids[text[at : at + size]])
            at += size
        return tokens

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        listed = enumerate(self.tokens)
        return {text: token for token, text in listed if text and token not in self._special}

    @cached_property
    def _longest_token(self) -> int:
        return max(map(len, self._ids))


def trie_of(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Collection[int]) -> LLTokenizer:
    """Build the trie, which takes some microseconds per token.

    Args:
        vocab_size: vocabulary of the model, whose last tokens may have no text.
        eos_token_ids: at least one.
    """
    ends = list(eos_token_ids)
    tokens = TokenizerWrapper(_Tokens(tokenizer, vocab_size, ends))
    return LLTokenizer(tokens, n_vocab=vocab_size, eos_token=ends)
