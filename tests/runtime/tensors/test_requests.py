"""A request's tensors become request inputs; what cannot be done is refused by its name."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.loops import PYLLAMA
from tests.support.tensors import tensor, tensors
from trtc.protos.errors import InvalidRequestError, NoTokenizerError
from trtc.protos.sampling import SamplingDefaults, SamplingOptions, SamplingParams
from trtc.runtime.requests.grammar import Grammar
from trtc.runtime.requests.request_input import RequestInput
from trtc.runtime.requests.validation import RequestBounds
from trtc.runtime.tensors.requests import RequestReader, RowRequest, asks_to_stop
from trtc.runtime.tensors.table import EMPTY_INPUTS, REFUSED_INPUTS
from trtc.runtime.text.tokenizer import Tokenizer

EOS, IM_END = 0, 2
READER = RequestReader(
    tokenizer=Tokenizer.load(PYLLAMA),
    bounds=RequestBounds(vocab_size=4096, max_context=512, max_sequences=8),
    eos_token_ids=frozenset({EOS}),
    exclude_input_in_output=True,
)
GREEDY = SamplingParams(temperature=0.0)


def read(**inputs: Any) -> RowRequest:
    (row,) = READER.read(tensors(**inputs))
    return row


def sampling(**inputs: Any) -> SamplingParams:
    return SamplingParams(**read(text_input="a", **inputs).request_input.sampling)


def test_the_request_of_every_guide_to_the_backend() -> None:
    """`{"text_input": ..., "max_tokens": 20, "bad_words": "", "stop_words": ""}`"""
    row = read(text_input="What is it?", max_tokens=20, bad_words=[""], stop_words=[""])
    assert row.request_input == RequestInput(
        text="What is it?", max_tokens=20, sampling={"temperature": 0.0}, include_stop=True
    )
    assert not row.stream
    assert not row.with_prompt
    assert row.end_ids == {EOS}


def test_the_models_defaults_count_where_a_request_does_not_say() -> None:
    reader = replace(
        READER,
        bounds=READER.bounds._replace(defaults=SamplingDefaults(temperature=0.6, top_p=0.9)),
    )

    def given(**inputs: Any) -> SamplingOptions:
        (row,) = reader.read(tensors(text_input="a", **inputs))
        return row.request_input.sampling

    assert given() == {}
    assert given(temperature=0.25) == {"temperature": 0.25}
    assert given(top_p=0.0) == {"temperature": 0.0, "top_p": 1.0}


def test_token_level_names_mean_the_same() -> None:
    row = read(
        input_ids=[5, 6, 7, 0, 0],
        input_lengths=3,
        request_output_len=4,
        streaming=True,
        runtime_top_k=5,
        runtime_top_p=0.5,
        random_seed=2**64 - 1,
        end_id=9,
        pad_id=3,
    )
    assert row.request_input == RequestInput(
        token_ids=(5, 6, 7),
        max_tokens=4,
        sampling={"top_k": 5, "top_p": 0.5, "seed": 2**64 - 1},
        stop_token_ids=(9,),
        ignore_eos=True,
        include_stop=True,
    )
    assert row.stream
    assert row.end_ids == {9}


def test_every_sampling_input_arrives() -> None:
    every: dict[str, Any] = {
        "top_k": 3,
        "top_p": 0.25,
        "min_p": 0.125,
        "temperature": 0.5,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.75,
        "frequency_penalty": -0.5,
        "seed": 7,
    }
    assert sampling(**every) == SamplingParams(**every)


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ({}, GREEDY),
        ({"top_k": 0, "top_p": 0.0}, GREEDY),
        ({"temperature": 0.7}, GREEDY),
        ({"top_k": 1, "top_p": 0.0}, SamplingParams(top_k=1)),
        ({"top_k": 0, "top_p": 0.5}, SamplingParams(top_p=0.5)),
        ({"top_p": 1.0, "temperature": 0.5}, SamplingParams(temperature=0.5)),
        ({"temperature": -2.0}, SamplingParams(temperature=-2.0)),  # refused by validation
        ({"top_p": -1.0}, SamplingParams(top_p=-1.0)),
    ],
    ids=str,
)
def test_without_top_k_and_top_p_the_likeliest_token_is_taken(
    inputs: dict[str, Any], expected: SamplingParams
) -> None:
    assert sampling(**inputs) == expected


def test_a_temperature_that_is_no_number_is_not_taken_for_greedy() -> None:
    assert np.isnan(sampling(temperature=float("nan")).temperature)


def test_end_id_replaces_the_engines_and_minus_one_is_none() -> None:
    row = read(text_input="a", end_id=-1)
    assert row.request_input.ignore_eos
    assert row.request_input.stop_token_ids == ()
    assert row.end_ids == frozenset()
    assert read(text_input="a", end_id=EOS).end_ids == {EOS}


def test_stop_words_are_strings_but_for_special_tokens_which_have_no_text() -> None:
    row = read(text_input="a", stop_words=["\n\n", "<|im_end|>", "", "# end"])
    assert row.request_input.stop == ("\n\n", "# end")
    assert row.request_input.stop_token_ids == (IM_END,)
    assert row.silent_ids == {EOS, IM_END}
    assert row.end_ids == {EOS}


def test_stop_words_list_holds_words_of_one_token() -> None:
    row = read(input_ids=[5], stop_words_list=[[11, IM_END, 0], [1, 2, -1]], end_id=EOS)
    assert row.request_input.stop_token_ids == (11, IM_END, EOS)
    assert row.silent_ids == {EOS, IM_END}
    assert read(input_ids=[5], stop_words_list=[[0], [-1]]).request_input.stop_token_ids == ()
    empty = {"input_ids": tensor("input_ids", [[5]]), "stop_words_list": np.empty((1, 2, 0))}
    assert READER.read(empty)[0].request_input.stop_token_ids == ()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([[1, 2], [2, -1]], "stop_words_list: has a stop word of 2 tokens. .* stop_words"),
        ([[1, 2], [3, -1]], "stop_words_list: has the word ends .3. in 2 tokens"),
        ([[1, 2], [2, 1]], "stop_words_list: has the word ends"),
        ([[1, 2], [-2, -1]], "stop_words_list: has the word ends"),
    ],
)
def test_a_word_list_that_means_nothing_is_refused(words: list[list[int]], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        read(input_ids=[5], stop_words_list=words)


def test_embedding_bias_by_words_and_by_vocabulary_add_up() -> None:
    (one,), (first, second) = (READER.tokenizer.encode(word) for word in ("import", "import os"))
    assert one == first
    dense = np.zeros(4096, np.float32)
    dense[first] = 0.5
    bias = sampling(
        embedding_bias_words=["import os", "import"],
        embedding_bias_weights=[2.0, -8.0],
        embedding_bias=dense.tolist(),
    ).logit_bias
    assert bias == {first: 2.0 - 8.0 + 0.5, second: 2.0}
    nothing = {"text_input": tensor("text_input", ["a"]), "embedding_bias": np.empty((1, 0))}
    assert "logit_bias" not in READER.read(nothing)[0].request_input.sampling


def test_bias_of_the_wrong_size_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="embedding_bias_weights: has 1 weights for 2"):
        read(text_input="a", embedding_bias_words=["a", "b"], embedding_bias_weights=[1.0])
    with pytest.raises(InvalidRequestError, match=r"embedding_bias: has 3 values\. .* 4096"):
        read(text_input="a", embedding_bias=[1.0, 2.0, 3.0])


def test_what_to_tell_is_read() -> None:
    row = read(
        text_input="a",
        return_log_probs=True,
        return_num_input_tokens=True,
        return_num_output_tokens=True,
        exclude_input_in_output=False,
        num_return_sequences=3,
        top_k=5,
    )
    assert row.log_probs
    assert row.request_input.logprobs == 0
    assert row.num_input_tokens
    assert row.num_output_tokens
    assert row.with_prompt
    assert row.request_input.n == 3


def test_the_prompt_is_left_out_as_the_model_is_told_and_always_when_streaming() -> None:
    reader = replace(READER, exclude_input_in_output=False)
    assert reader.read(tensors(text_input="a"))[0].with_prompt
    assert not reader.read(tensors(text_input="a", exclude_input_in_output=True))[0].with_prompt
    assert not reader.read(tensors(text_input="a", stream=True))[0].with_prompt


def test_rows_of_a_batch_are_requests_of_their_own() -> None:
    batch = {
        "text_input": tensor("text_input", ["a", "b"]),
        "max_tokens": tensor("max_tokens", [1, 2]),
        "stop_words": tensor("stop_words", [["x", ""], ["y", "z"]]),
    }
    first, second = (row.request_input for row in READER.read(batch))
    assert (first.text, first.max_tokens, first.stop) == ("a", 1, ("x",))
    assert (second.text, second.max_tokens, second.stop) == ("b", 2, ("y", "z"))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"max_tokens": 3}, "text_input: is missing. .*input_ids"),
        ({"text_input": "a", "input_ids": [1]}, "text_input: is sent beside input_ids"),
        ({"input_ids": [1, 2], "input_lengths": 3}, "input_lengths: is 3, input_ids has 2"),
        ({"input_ids": [1, 2], "input_lengths": 0}, "input_lengths: is 0"),
        ({"text_input": "a", "top_k": 1, "runtime_top_k": 1}, "top_k: is sent as runtime_top_k"),
        ({"text_input": "a", "seed": 1, "random_seed": 2}, "seed: is sent as random_seed"),
        ({"text_input": "a", "max_tokens": [1, 2]}, "max_tokens: has 2 values"),
        ({"text_input": b"\xff"}, "text_input: is not UTF-8"),
        ({"text_input": "a", "stop_words": [b"\xff"]}, "stop_words: is not UTF-8"),
    ],
    ids=str,
)
def test_a_contradiction_is_named(inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        read(**inputs)


def test_inputs_must_have_the_rows_of_the_prompt() -> None:
    batch = {"text_input": tensor("text_input", ["a", "b"]), "top_k": tensor("top_k", [1])}
    with pytest.raises(InvalidRequestError, match="top_k: has 1 rows, text_input has 2"):
        READER.read(batch)


ASKING: dict[str, Any] = {
    "beam_width": 2,
    "bad_words": ["", "no"],
    "bad_words_list": [[7, 0], [1, -1]],
    "return_context_logits": True,
    "return_generation_logits": True,
    "return_perf_metrics": True,
    "lora_task_id": 3,
    "lora_weights": [[0.0, 1.0]],
    "lora_config": [[0, 1, 2]],
}
"""A value that asks for what is not there, for each refused input."""

NOT_ASKING: dict[str, Any] = {
    "beam_width": 1,
    "bad_words": [""],
    "bad_words_list": [[0, 0], [-1, -1]],
    "return_context_logits": False,
    "return_generation_logits": False,
    "return_perf_metrics": False,
    "lora_task_id": 0,
}


@pytest.mark.parametrize("name", ["min_tokens", "min_length"])
def test_the_least_number_of_tokens_is_read(name: str) -> None:
    assert read(text_input="a", **{name: 5}).request_input.min_tokens == 5


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("json", "json_object"),
        ("json_schema", "json_schema"),
        ("regex", "regex"),
        ("ebnf_grammar", "lark"),
        ("structural_tag", "structural_tag"),
        ("named", "named"),
    ],
)
def test_a_guide_is_a_grammar(kind: Any, expected: Any) -> None:
    asked = read(
        text_input="a", guided_decoding_guide_type=kind, guided_decoding_guide="{}"
    ).request_input
    assert asked.grammar == Grammar(expected, "{}", "guided_decoding_guide")
    nothing = read(
        text_input="a", guided_decoding_guide_type="", guided_decoding_guide=""
    ).request_input
    assert nothing.grammar is None
    for wrong in (
        {"guided_decoding_guide": "{}"},
        {"guided_decoding_guide_type": "xml"},
    ):
        with pytest.raises(InvalidRequestError, match="guided_decoding_guide_type: is '"):
            read(text_input="a", **wrong)


def test_every_refused_input_is_tried() -> None:
    assert set(ASKING) == {refused.tensor.name for refused in REFUSED_INPUTS}


@pytest.mark.parametrize("name", ASKING)
def test_what_the_runtime_does_not_do_is_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"{name}: is not supported. [A-Z]"):
        read(text_input="a", **{name: ASKING[name]})


def test_a_value_that_asks_for_nothing_is_taken() -> None:
    assert read(text_input="a", **NOT_ASKING) == read(text_input="a")


def test_inputs_of_beam_search_and_padding_change_nothing() -> None:
    values = {one.name: True if one.data_type == "TYPE_BOOL" else 2 for one in EMPTY_INPUTS}
    assert read(text_input="a", **values) == read(text_input="a")


@pytest.mark.parametrize(
    "inputs",
    [
        {"stop_words": ["a"]},
        {"embedding_bias_words": ["a"], "embedding_bias_weights": [1.0]},
    ],
    ids=str,
)
def test_words_need_a_tokenizer(inputs: dict[str, Any]) -> None:
    reader = replace(READER, tokenizer=None)
    with pytest.raises(NoTokenizerError, match=f"{next(iter(inputs))}: .* without a tokenizer"):
        reader.read(tensors(input_ids=[1], **inputs))
    assert reader.read(tensors(input_ids=[1], stop_words=[""]))[0].request_input.stop == ()


def test_a_stop_request_is_told_from_others() -> None:
    assert asks_to_stop(tensors(input_ids=[0], stop=True))
    assert not asks_to_stop(tensors(input_ids=[0], stop=False))
    assert not asks_to_stop(tensors(input_ids=[0]))


class RefusingTokenizer(Tokenizer):
    """Fails the test if it is asked to tokenise at all."""

    def __init__(self) -> None:
        """Without a vocabulary."""

    def encode(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        raise AssertionError(f"{len(text)} characters were tokenised")


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({"input_ids": [1] * 512}, "input_ids: has 512 tokens"),
        ({"input_ids": [1] * 600, "input_lengths": 600}, "input_ids: has 600 tokens"),
        ({"input_ids": [1], "stop_words": ["x"] * 17}, r"stop_words \(how many\): is 17"),
        ({"input_ids": [1], "stop_words": ["x" * 513]}, r"stop_words \(characters\): is 513"),
        (
            {"input_ids": [1], "stop_words_list": [[1] * 257, [*range(1, 258)]]},
            "stop_words_list: has 514 values",
        ),
        (
            {
                "input_ids": [1],
                "embedding_bias_words": ["x"] * 1025,
                "embedding_bias_weights": [1.0] * 1025,
            },
            "embedding_bias_words: has 1025 values",
        ),
    ],
)
def test_lengths_are_judged_before_anything_is_tokenised(inputs: dict[str, Any], said: str) -> None:
    reader = replace(READER, tokenizer=RefusingTokenizer())
    with pytest.raises(InvalidRequestError, match=said):
        reader.read(tensors(**inputs))


def test_a_prompt_may_be_padded_beyond_the_context() -> None:
    assert read(input_ids=[1] * 600, input_lengths=3).request_input.token_ids == (1, 1, 1)
