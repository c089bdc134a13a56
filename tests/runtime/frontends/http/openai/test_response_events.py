"""Responses of several items: the SDK's own reader of streams is the oracle."""

from collections.abc import Sequence
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from openai import omit
from openai._models import construct_type_unchecked
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import ResponseStreamEvent

from tests.support.answer_parts import USAGE, answers, call, cut, sse_documents
from trtc.runtime.frontends.http.openai.fields import ResponseFields
from trtc.runtime.frontends.http.openai.response_events import Response
from trtc.runtime.requests.request import FinishReason, Output
from trtc.runtime.text.answer import AnswerPart


def written(outputs: Sequence[Output]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The object of the API, and the events of its stream."""
    response = Response("resp_1", "m", ResponseFields(), {}, wants_logprobs=False)
    stream = response.first_events()
    for output in outputs:
        stream += response.encoded(response.take(output))
    stream += response.last_events()
    whole = msgspec.json.decode(msgspec.json.encode(response.whole()))
    return whole, [msgspec.json.decode(one) for one in sse_documents(stream)]


def one_output(*parts: AnswerPart) -> Output:
    return Output("r", 0, (1,), "", (), FinishReason.STOP, "", USAGE, (), parts)


def snapshot(events: Sequence[dict[str, Any]]) -> Any:
    """What the SDK makes of the events but the last one, which has the whole."""
    state = ResponseStreamState[Any](input_tools=omit, text_format=omit)
    for one in events[:-1]:
        made: Any = construct_type_unchecked(type_=ResponseStreamEvent, value=one)  # type: ignore[arg-type]
        state.handle_event(made)
    return state


@given(st.data())
def test_the_sdk_reads_a_stream_as_the_whole_response(data: st.DataObject) -> None:
    outputs = data.draw(cut(data.draw(answers())))
    whole, events = written(outputs)
    assert [one["sequence_number"] for one in events] == list(range(len(events)))
    state = snapshot(events)
    done = [state._completed_output[at].to_dict() for at in range(len(whole["output"]))]
    assert done == whole["output"]
    assert events[-1] == {
        "type": f"response.{whole['status']}",
        "sequence_number": len(events) - 1,
        "response": {**whole, "completed_at": events[-1]["response"]["completed_at"]},
    }
    grown = state._output_items
    for at, item in enumerate(whole["output"]):
        if item["type"] == "message":
            assert grown[at].content[0].text == item["content"][0]["text"]
        if item["type"] == "function_call":
            assert grown[at].arguments == item["arguments"]
    kinds = {"text": "message", "reasoning": "reasoning", "call": "function_call"}
    parts = [part for output in outputs for part in output.parts]
    assert {one["type"] for one in whole["output"]} == (
        {kinds[part.kind] for part in parts} or {"message"}
    )
    assert len({one["id"] for one in whole["output"]}) == len(whole["output"])


def test_events_of_thoughts_text_and_calls_come_in_the_order_of_the_api() -> None:
    parts = (AnswerPart("reasoning", "Hm."), AnswerPart("text", "Look:"), call(0))
    whole, events = written([one_output(*parts)])
    kinds = [one["type"].removeprefix("response.") for one in events]
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    reasoning, message, function_call = whole["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert reasoning["summary"] == []
    assert message["content"][0]["text"] == "Look:"
    assert (function_call["call_id"], function_call["name"]) == ("call_0", "f")
    assert function_call["arguments"] == '{"x": 1}'
    assert whole["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}


def test_what_max_tokens_cut_is_incomplete() -> None:
    outputs = [
        one_output(),
        Output("r", 0, (1,), "", (), FinishReason.LENGTH, "", USAGE, (), (call(0),)),
    ]
    outputs[0] = Output("r", 0, (1,), "a", parts=(AnswerPart("text", "a"),))
    whole, _ = written(outputs)
    assert [one["status"] for one in whole["output"]] == ["completed", "incomplete"]
    assert whole["status"] == "incomplete"
