"""Outputs become messages of the shapes and contents that clients of tensorrtllm_backend read."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace as with_fields

from trtc.runtime.requests.request import FinishReason, Output, TokenLogprobs, Usage
from trtc.runtime.requests.request_input import RequestInput
from trtc.runtime.tensors.replies import Message, Prompt, RowReplies
from trtc.runtime.tensors.requests import RowRequest

EOS, IM_END = 2, 9
PROMPT = Prompt((5, 6), "hi ")
ROW = RowRequest(
    request_input=RequestInput(text="hi "),
    stream=True,
    with_prompt=False,
    end_ids=frozenset({EOS}),
    silent_ids=frozenset({EOS, IM_END}),
    log_probs=False,
    num_input_tokens=False,
    num_output_tokens=False,
    sent_as={},
)


def output(*token_ids: int, text: str = "", index: int = 0, **fields: Any) -> Output:
    logprobs = tuple(TokenLogprobs(token, -token / 8, (), ()) for token in token_ids)
    return Output("r", index, token_ids, text, logprobs=logprobs, **fields)


def last(*token_ids: int, reason: FinishReason = FinishReason.STOP, **fields: Any) -> Output:
    return output(*token_ids, finish_reason=reason, usage=Usage(2, 0, 3), **fields)


def replies(row: RowRequest = ROW, *, batch_index: int | None = None) -> RowReplies:
    return RowReplies(row, PROMPT, batch_index=batch_index, has_text=True)


def plain(message: Message) -> dict[str, Any]:
    return {name: array.tolist() for name, array in message.items()}


def test_a_streamed_message_holds_what_is_new() -> None:
    told = replies()
    first, second = (told.messages([one])[0] for one in (output(11, text="a"), output(12)))
    assert plain(first) == {
        "output_ids": [[[11]]],
        "sequence_length": [[1]],
        "text_output": [b"a"],
    }
    assert plain(second)["text_output"] == [b""]  # half a character: its text comes later
    assert first["output_ids"].dtype == np.int32
    assert first["text_output"].shape == (1,)  # clients read [0] and decode it


def test_unstreamed_there_is_one_message_with_all_of_it() -> None:
    told = replies(replace(ROW, stream=False))
    assert told.messages([output(11, text="a"), output(12, text="é")]) == []
    (message,) = told.messages([last(13, text="c", reason=FinishReason.LENGTH)])
    assert plain(message) == {
        "output_ids": [[[11, 12, 13]]],
        "sequence_length": [[3]],
        "text_output": ["aéc".encode()],
        "finish_reason": [b"length"],
    }


def test_the_end_token_is_no_output() -> None:
    (message,) = replies(replace(ROW, log_probs=True)).messages(
        [last(11, EOS, text="a</s>", matched_stop="</s>")]
    )
    assert plain(message)["output_ids"] == [[[11]]]
    assert plain(message)["text_output"] == [b"a"]
    assert plain(message)["output_log_probs"] == [[[-11 / 8]]]


def test_a_message_of_the_end_token_alone_is_empty() -> None:
    (message,) = replies().messages([last(EOS, text="</s>", matched_stop="</s>")])
    assert message["output_ids"].shape == (1, 1, 0)
    assert plain(message)["sequence_length"] == [[0]]
    assert plain(message)["text_output"] == [b""]
    assert plain(message)["finish_reason"] == [b"stop"]


def test_a_special_stop_word_is_a_token_without_text() -> None:
    (message,) = replies().messages([last(IM_END, text="a<|im_end|>", matched_stop="<|im_end|>")])
    assert plain(message)["output_ids"] == [[[IM_END]]]
    assert plain(message)["text_output"] == [b"a"]


def test_a_stop_word_is_part_of_the_output() -> None:
    (message,) = replies().messages([last(11, 12, text="x END", matched_stop="END")])
    assert plain(message)["output_ids"] == [[[11, 12]]]
    assert plain(message)["text_output"] == [b"x END"]


def test_an_end_token_within_the_output_stays() -> None:
    """With end_id -1 it means nothing."""
    row = replace(ROW, end_ids=frozenset(), silent_ids=frozenset())
    (message,) = replies(row).messages([last(EOS, text="", reason=FinishReason.LENGTH)])
    assert plain(message)["output_ids"] == [[[EOS]]]
    (message,) = replies().messages([last(EOS, text="", reason=FinishReason.LENGTH)])
    assert plain(message)["output_ids"] == [[[EOS]]]


def test_the_prompt_comes_first_when_asked_for() -> None:
    row = replace(ROW, stream=False, with_prompt=True, num_output_tokens=True)
    (message,) = replies(row).messages([last(11, text="a")])
    assert plain(message)["output_ids"] == [[[5, 6, 11]]]
    assert plain(message)["sequence_length"] == [[3]]
    assert plain(message)["text_output"] == [b"hi a"]
    assert plain(message)["num_output_tokens"] == [[1]]


def test_log_probs_are_of_the_message_and_their_sum_from_the_beginning() -> None:
    told = replies(replace(ROW, log_probs=True, num_input_tokens=True))
    first, second = (told.messages([output(token)])[0] for token in (8, 16))
    assert plain(first)["output_log_probs"] == [[[-1.0]]]
    assert plain(second)["output_log_probs"] == [[[-2.0]]]
    assert [plain(one)["cum_log_probs"] for one in (first, second)] == [[[-1.0]], [[-3.0]]]
    assert plain(second)["num_input_tokens"] == [[2]]


@pytest.mark.parametrize("stream", [True, False])
def test_several_sequences_and_rows_say_which_they_are(stream: bool) -> None:
    row = replace(ROW, stream=stream, request_input=with_fields(ROW.request_input, n=2))
    told = replies(row, batch_index=3)
    told.messages([output(11, index=0, text="a"), output(12, index=1, text="b")])
    outputs = [
        output(13, index=1, text="c", finish_reason=FinishReason.LENGTH),
        last(14, index=0, text="d"),
    ]
    second, first = map(plain, told.messages(outputs))
    assert (first["sequence_index"], second["sequence_index"]) == ([[0]], [[1]])
    assert first["batch_index"] == second["batch_index"] == [[3]]
    whole = ([b"d"], [b"c"]) if stream else ([b"ad"], [b"bc"])
    assert (first["text_output"], second["text_output"]) == whole


def test_without_a_tokenizer_there_is_no_text() -> None:
    told = RowReplies(ROW, PROMPT, batch_index=None, has_text=False)
    assert "text_output" not in told.messages([output(11)])[0]
