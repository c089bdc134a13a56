"""Errors in the words of the client keep what their class adds."""

import pytest

from trtc.protos.errors import InvalidRequestError, QueueFullError
from trtc.runtime.requests.naming import as_sent, fields_as_sent


def test_the_longest_beginning_of_a_path_is_renamed() -> None:
    names = {"stop": "stop_words", "chat": "messages", "chat.messages": "messages"}
    for field, told in (
        ("stop (how many)", "stop_words (how many)"),
        ("chat.messages[0].role", "messages[0].role"),
        ("stopper", "stopper"),
        ("", ""),
    ):
        renamed = as_sent(InvalidRequestError("is wrong", field=field, remedy="Mend it"), names)
        assert (renamed.field, renamed.problem, renamed.remedy) == (told, "is wrong", "Mend it")
    assert str(as_sent(InvalidRequestError("is 5", field="stop"), names)) == "stop_words: is 5"


def test_a_full_queue_still_says_how_long_to_wait() -> None:
    full = QueueFullError("is full", field="n", limit="queue", retry_after_s=2.5)
    with pytest.raises(QueueFullError) as caught, fields_as_sent({"n": "copies"}):
        raise full
    renamed = caught.value
    assert (renamed.field, renamed.limit, renamed.retry_after_s) == ("copies", "queue", 2.5)
    assert full.field == "n"
