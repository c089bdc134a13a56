"""Ends a thought that has used up its budget of tokens, by its own mark.

thought of at most `budget` tokens | tokens of the mark, one after the other | anything
"""

from collections.abc import Sequence

import numpy as np

from trtc.protos.answer_formats import ThoughtFormat
from trtc.runtime.requests.token_masks import TokenEdit
from trtc.runtime.sampling.masks import pack_mask
from trtc.runtime.text.tokenizer import Tokenizer

_MOST_BEGIN_TOKENS = 32
"""In which a thought that the model begins itself has begun, or it begins none."""


class ThoughtBudget:
    """Of a request (implements TokenMasks)."""

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
            budget: tokens of the thought, without its marks.
            in_thought: whether the prompt ends within it.
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
        """Where the thought begins, behind its mark; None: nowhere yet."""
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
