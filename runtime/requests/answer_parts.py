"""The parts of an answer, whether it is split or not."""

from collections.abc import Sequence

from trtc.runtime.requests.completion import Completion
from trtc.runtime.requests.request import Output
from trtc.runtime.text.answer import AnswerPart


def answer_parts(said: Output | Completion) -> Sequence[AnswerPart]:
    """Its parts; if the answer is not split, its text as one part, unless it is empty."""
    if said.parts or not said.text:
        return said.parts
    return (AnswerPart("text", said.text),)
