"""Limits the tokens of a model's reasoning: at the limit the end marker is forced.

thought of at most `budget` tokens | tokens of the end marker, one after the other | anything
"""

from collections.abc import Sequence

import numpy as np

from trtc.protos.answer_formats import ThoughtFormat
from trtc.runtime.requests.token_masks import TokenEdit
from trtc.runtime.sampling.masks import pack_mask
from trtc.runtime.text.tokenizer import Tokenizer

_MOST_BEGIN_TOKENS = 32
"""Output tokens within which a model that begins a thought itself must have begun it."""


class ThoughtBudget:
    """The budget of one request (implements TokenMasks)."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        thought: ThoughtFormat,
        budget: int,
        *,
        vocab_size: int,
        in_thought: bool,
    ) -> None:
        """
        Args:
            budget: tokens of the thought, without its markers.
            in_thought: whether the prompt ends within a thought.
        """
        self._tokenizer = tokenizer
        self._thought = thought
        self._budget = budget
        self._in_thought = in_thought
        self._end_ids = tokenizer.encode(thought.end, add_special_tokens=False)
        self._only = [_only(token, vocab_size) for token in self._end_ids]

    def allowed(self, output_ids: Sequence[int]) -> TokenEdit:
        begin = self._begin(output_ids)
        if begin is None:
            return TokenEdit()
        spent = begin + self._budget
        num_forced = len(output_ids) - spent
        if not 0 <= num_forced < len(self._end_ids):
            return TokenEdit()
        if self._thought.end in self._text(output_ids[begin:spent]):
            return TokenEdit()
        if tuple(output_ids[spent:]) != self._end_ids[:num_forced]:
            return TokenEdit()
        return TokenEdit(self._only[num_forced])

    def _begin(self, output_ids: Sequence[int]) -> int | None:
        """Index of the thought's first token, after its begin marker; None: it has not begun."""
        if self._in_thought:
            return 0
        if len(output_ids) <= self._budget:
            return None
        for size in range(1, min(_MOST_BEGIN_TOKENS, len(output_ids)) + 1):
            if self._text(output_ids[:size]).lstrip().startswith(self._thought.begins):
                return size
        return None

    def _text(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special=False)


def _only(token: int, vocab_size: int) -> bytes:
    allowed = np.zeros(vocab_size, np.bool_)
    allowed[token] = True
    return pack_mask(allowed)
