"""The parts of an answer, whether it is split or not."""

from collections.abc import Sequence

from trtc.runtime.requests.completion import Completion
from trtc.runtime.requests.request import Output
from trtc.runtime.text.answer import AnswerPart


def answer_parts(said: Output | Completion) -> Sequence[AnswerPart]:
    """Those that it has; of one that is not split, its text, if there is any."""
    if said.parts or not said.text:
        return said.parts
    return (AnswerPart("text", said.text),)
