"""Converts outputs of the engine to a row's messages: output name -> array.

`text_output` and `finish_reason` are [1]; the others have a batch and a beam axis, both of extent
1, as in tensorrtllm_backend.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from trtc.runtime.requests.request import FinishReason, Output
from trtc.runtime.tensors.requests import RowRequest

Message = Mapping[str, NDArray[Any]]


class Prompt(NamedTuple):
    token_ids: tuple[int, ...]
    text: str


@dataclass
class _Pending:
    """Output of one sequence that no message has sent yet."""

    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    sum_log_probs: float = 0.0
    """Sum since the beginning of the sequence."""

    def add(self, output: Output) -> None:
        self.token_ids += output.token_ids
        self.texts.append(output.text)
        for entry in output.logprobs:
            self.log_probs.append(entry.logprob)
            self.sum_log_probs += entry.logprob

    def forget(self) -> None:
        self.token_ids, self.texts, self.log_probs = [], [], []


class RowReplies:
    """Makes the messages of one row."""

    def __init__(
        self, row: RowRequest, prompt: Prompt, *, batch_index: int | None, has_text: bool
    ) -> None:
        """
        Args:
            batch_index: None if the batch has one row.
            has_text: whether the engine has a tokenizer.
        """
        self._row = row
        self._prompt = prompt
        self._batch_index = batch_index
        self._has_text = has_text
        self._pending = [_Pending() for _ in range(row.request_input.n)]

    def messages(self, outputs: Sequence[Output]) -> list[Message]:
        """Messages for new outputs: for each output when streaming, else for finished sequences."""
        messages = []
        for output in outputs:
            pending = self._pending[output.index]
            pending.add(self._without_end(output))
            if self._row.stream or output.finish_reason is not None:
                messages.append(self._message(pending, output))
                pending.forget()
        return messages

    def _without_end(self, output: Output) -> Output:
        """An output without the text and the token that only ended it."""
        last = output.token_ids[-1] if output.token_ids else None
        if output.finish_reason is not FinishReason.STOP or last not in self._row.silent_ids:
            return output
        output = replace(output, text=output.text.removesuffix(output.matched_stop))
        if last not in self._row.end_ids:
            return output
        return replace(output, token_ids=output.token_ids[:-1], logprobs=output.logprobs[:-1])

    def _message(self, pending: _Pending, output: Output) -> Message:
        row = self._row
        text, token_ids = "".join(pending.texts), pending.token_ids
        if row.with_prompt:
            text = self._prompt.text + text
            token_ids = [*self._prompt.token_ids, *token_ids]
        message: dict[str, NDArray[Any]] = {
            "output_ids": np.array([[token_ids]], np.int32),
            "sequence_length": _int32(len(token_ids)),
        }
        if self._has_text:
            message["text_output"] = _string(text)
        if output.finish_reason is not None:
            message["finish_reason"] = _string(output.finish_reason.value)
        if row.log_probs:
            message["cum_log_probs"] = np.array([[pending.sum_log_probs]], np.float32)
            message["output_log_probs"] = np.array([[pending.log_probs]], np.float32)
        if row.num_input_tokens:
            message["num_input_tokens"] = _int32(len(self._prompt.token_ids))
        if row.num_output_tokens:
            message["num_output_tokens"] = _int32(len(pending.token_ids))
        if row.request_input.n > 1:
            message["sequence_index"] = _int32(output.index)
        if self._batch_index is not None:
            message["batch_index"] = _int32(self._batch_index)
        return message


def _int32(value: int) -> NDArray[np.int32]:
    return np.array([[value]], np.int32)


def _string(text: str) -> NDArray[np.object_]:
    return np.array([text.encode()], object)
