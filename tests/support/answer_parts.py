"""Answers of text, thoughts and calls, in outputs that are cut anywhere: for tests of dialects."""

from collections.abc import Sequence

from hypothesis import strategies as st

from trtc.runtime.requests.request import FinishReason, Output, Usage
from trtc.runtime.text.answer import AnswerPart, joined

USAGE = Usage(9, 4, 5, reasoning_tokens=2)
_ARGUMENTS = ("{}", '{"x": 1}', '{"a": {"b": [true, null, "\\u00e9\\n"]}, "c": "d"}')


def call(number: int, arguments: str = '{"x": 1}', name: str = "f") -> AnswerPart:
    return AnswerPart("call", arguments, number, f"call_{number}", name)


@st.composite
def answers(draw: st.DrawFn) -> tuple[AnswerPart, ...]:
    """Parts as they follow each other in an answer: of two neighbours, one is a call or they are
    of different kinds."""
    kinds = draw(st.lists(st.sampled_from(["text", "reasoning", "call"]), max_size=6))
    parts: list[AnswerPart] = []
    num_calls = 0
    for kind in kinds:
        if kind == "call":
            parts.append(call(num_calls, draw(st.sampled_from(_ARGUMENTS)), f"f{num_calls}"))
            num_calls += 1
        else:
            text = draw(st.text(st.sampled_from('ab\n"é\\'), min_size=1, max_size=6))
            parts.append(AnswerPart("text" if kind == "text" else "reasoning", text))
    return joined(parts)


@st.composite
def cut(draw: st.DrawFn, parts: Sequence[AnswerPart]) -> list[Output]:
    """Outputs that have the parts in pieces; the last one ends the request."""
    pieces: list[AnswerPart] = []
    for part in parts:
        at = draw(st.integers(0, len(part.text)))
        texts = [part.text[:at], part.text[at:]] if 0 < at < len(part.text) else [part.text]
        pieces.append(AnswerPart(part.kind, texts[0], part.index, part.id, part.name))
        pieces += [AnswerPart(part.kind, one, part.index) for one in texts[1:]]
    groups: list[list[AnswerPart]] = [[]]
    for piece in pieces:
        if draw(st.booleans()):
            groups.append([])
        groups[-1].append(piece)
    reason = draw(st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]))
    last = len(groups) - 1
    return [
        Output(
            request_id="r",
            index=0,
            token_ids=(at,),
            text="".join(one.text for one in group if one.kind == "text"),
            finish_reason=reason if at == last else None,
            usage=USAGE if at == last else None,
            parts=tuple(group),
        )
        for at, group in enumerate(groups)
    ]


def sse_documents(stream: bytes) -> list[bytes]:
    """The JSON of each event."""
    blocks = stream.decode().removesuffix("\n\n").split("\n\n")
    return [block.partition("data: ")[2].encode() for block in blocks]
