"""Messages of several blocks: the SDK's own reader of streams is the oracle."""

from typing import Any

import msgspec
import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message as SdkMessage
from hypothesis import given
from hypothesis import strategies as st

from tests.support.answer_parts import answers, call, cut, sse_documents
from trtc.runtime.frontends.http.anthropic.message import Message, encoded
from trtc.runtime.requests.request import FinishReason, Output, Usage
from trtc.runtime.text.answer import AnswerPart


def written(outputs: list[Output], **options: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The object of the API, and the events of its stream."""
    message = Message(id="msg_1", model="m", num_prompt_tokens=9, **options)
    stream = message.first_events()
    for output in outputs:
        stream += encoded(message.take(output))
    stream += message.last_events()
    whole = msgspec.json.decode(msgspec.json.encode(message.whole()))
    return whole, [msgspec.json.decode(one) for one in sse_documents(stream)]


def read(events: list[dict[str, Any]]) -> dict[str, Any]:
    """What the SDK makes of a stream."""
    snapshot: Any = None
    buffers: dict[int, bytes] = {}
    for one in events:
        if one["type"] != "ping":
            event: Any = one
            snapshot = accumulate_event(event=event, current_snapshot=snapshot, json_bufs=buffers)
    return snapshot.to_dict()  # type: ignore[no-any-return]


@given(st.data())
def test_the_sdk_reads_a_stream_as_the_whole_message(data: st.DataObject) -> None:
    outputs = data.draw(cut(data.draw(answers())))
    whole, events = written(outputs)
    expected = SdkMessage.model_validate(whole).to_dict(exclude_unset=False)
    found = SdkMessage.model_validate(read(events)).to_dict(exclude_unset=False)
    assert found == expected
    blocks = [one["type"] for one in whole["content"]]
    kinds = {"text": "text", "reasoning": "thinking", "call": "tool_use"}
    parts = [part for output in outputs for part in output.parts]
    assert set(blocks) == ({kinds[part.kind] for part in parts} or {"text"})
    started = [one["index"] for one in events if one["type"] == "content_block_start"]
    stopped = [one["index"] for one in events if one["type"] == "content_block_stop"]
    assert started == stopped == list(range(len(blocks)))


def test_thoughts_text_and_calls_are_blocks_in_their_order() -> None:
    parts = (AnswerPart("reasoning", "Hm."), AnswerPart("text", "Look:"), call(0), call(1, "{}"))
    output = Output("r", 0, (1,), "Look:", (), FinishReason.STOP, "", Usage(1, 0, 1), (), parts)
    whole, events = written([output])
    assert whole["content"] == [
        {"type": "thinking", "thinking": "Hm.", "signature": ""},
        {"type": "text", "text": "Look:"},
        {"type": "tool_use", "id": "call_0", "name": "f", "input": {"x": 1}},
        {"type": "tool_use", "id": "call_1", "name": "f", "input": {}},
    ]
    assert whole["stop_reason"] == "tool_use"
    deltas = [one["delta"]["type"] for one in events if one["type"] == "content_block_delta"]
    assert deltas == ["thinking_delta", "text_delta", "input_json_delta", "input_json_delta"]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    ("reason", "matched", "said"),
    [
        (FinishReason.LENGTH, "", "max_tokens"),
        (FinishReason.STOP, "END", "stop_sequence"),
        (FinishReason.STOP, "", "tool_use"),
    ],
)
def test_an_answer_with_calls_says_why_it_ended(
    reason: FinishReason, matched: str, said: str
) -> None:
    output = Output("r", 0, (1,), "", (), reason, matched, Usage(1, 0, 1), (), (call(0),))
    whole, _ = written([output], stop_sequences=frozenset({"END"}))
    assert whole["stop_reason"] == said


def test_arguments_that_are_no_object_are_text_of_a_whole_message() -> None:
    parts = (call(0), call(1, '{"x": '))
    output = Output("r", 0, (1,), "", (), FinishReason.LENGTH, "", Usage(1, 0, 1), (), parts)
    whole, _ = written([output])
    assert [one["type"] for one in whole["content"]] == ["tool_use", "text"]
    assert whole["content"][1]["text"] == '{"x": '
    assert whole["stop_reason"] == "max_tokens"


@given(st.data())
def test_no_token_id_is_lost(data: st.DataObject) -> None:
    outputs = data.draw(cut(data.draw(answers())))
    whole, events = written(outputs, returns_ids=True)
    sent = [token for one in events for token in one.get("token_ids", ())]
    assert sent == whole["token_ids"] == list(range(len(outputs)))
