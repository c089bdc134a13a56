"""Calls come whole, in whatever pieces they are read."""

from hypothesis import given
from hypothesis import strategies as st

from tests.support.answer_parts import answers, call, cut
from trtc.runtime.frontends.http.ollama.writing import WholeCalls, chat_form
from trtc.runtime.text.answer import joined


@given(st.data())
def test_pieces_of_a_call_wait_for_its_end(data: st.DataObject) -> None:
    parts = data.draw(answers())
    calls = WholeCalls()
    found = [part for output in data.draw(cut(parts)) for part in calls.take(output)]
    assert joined(found) == parts
    assert [one for one in found if one.kind == "call"] == [
        one for one in parts if one.kind == "call"
    ]


def test_arguments_that_are_no_object_are_text() -> None:
    message = chat_form((call(0), call(1, '{"x": ')))["message"]
    assert message.content == '{"x": '
    assert [one.id for one in message.tool_calls] == ["call_0"]
