"""Request inputs, outputs and errors survive the wire."""

from typing import Any

import grpc
import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtc.protos import errors
from trtc.protos.trtc.v1 import inference_pb2 as pb
from trtc.runtime.requests.grammar import Grammar, choice
from trtc.runtime.requests.model_info import ModelInfo
from trtc.runtime.requests.request import FinishReason, Output, TokenLogprobs, Usage
from trtc.runtime.requests.request_input import RequestInput
from trtc.runtime.requests.tool_choice import ToolChoice
from trtc.runtime.text.chat import Chat, ChatMessage, ContentPart, ToolCall
from trtc.runtime.wire.failures import status_name, to_error, to_status
from trtc.runtime.wire.messages import (
    info_from_wire,
    info_to_wire,
    input_from_wire,
    input_to_wire,
    output_from_wire,
    output_to_wire,
)

tokens = st.integers(0, 2**32 - 1)
text = st.text(st.characters(codec="utf-8"), max_size=20)
numbers = st.floats(allow_nan=False)
named = text.filter(bool)
messages = st.builds(
    ChatMessage,
    role=text,
    content=st.none() | text,
    parts=st.lists(st.builds(ContentPart, text, named), max_size=2).map(tuple),
    name=text,
    tool_calls=st.lists(st.builds(ToolCall, text, text, text, named), max_size=2).map(tuple),
    tool_call_id=text,
    reasoning_content=text,
)
chats = st.builds(
    Chat,
    messages=st.lists(messages, max_size=3).map(tuple),
    tools=text,
    documents=text,
    template_kwargs=text,
    add_generation_prompt=st.none() | st.booleans(),
    continue_final_message=st.booleans(),
)
prompts = st.one_of(
    st.builds(lambda value: {"text": value}, text),
    st.builds(lambda value: {"token_ids": tuple(value)}, st.lists(tokens)),
    st.builds(lambda value: {"chat": value}, chats),
)
samplings = st.fixed_dictionaries(
    {},
    optional={
        "temperature": numbers,
        "top_k": tokens,
        "top_p": numbers,
        "min_p": numbers,
        "repetition_penalty": numbers,
        "presence_penalty": numbers,
        "frequency_penalty": numbers,
        "logit_bias": st.dictionaries(tokens, numbers, min_size=1, max_size=3),
        "seed": st.integers(0, 2**64 - 1),
    },
)

choices = st.builds(
    ToolChoice,
    st.sampled_from(["none", "auto", "required"]),
    st.lists(text, max_size=2).map(tuple),
)
grammars = st.one_of(
    st.builds(
        Grammar, st.sampled_from(["json_schema", "regex", "lark", "structural_tag", "named"]), text
    ),
    st.just(Grammar("json_object")),
    st.builds(choice, st.lists(named, min_size=1, max_size=3)),
)


request_inputs = prompts.flatmap(
    # Not of the class itself: hypothesis would resolve its annotations, which are not imported.
    lambda prompt: st.builds(
        lambda **fields: RequestInput(**fields),
        **{name: st.just(value) for name, value in prompt.items()},
        model=text,
        request_id=text,
        sampling=samplings,
        max_tokens=st.none() | tokens,
        grammar=st.none() | grammars,
        stop=st.lists(text, max_size=3).map(tuple),
        stop_token_ids=st.lists(tokens, max_size=3).map(tuple),
        ignore_eos=st.booleans(),
        min_tokens=tokens,
        include_stop=st.booleans(),
        n=tokens,
        logprobs=st.none() | tokens,
        prompt_logprobs=st.none() | tokens,
        priority=st.integers(-(2**31), 2**31 - 1),
        tool_choice=choices,
        parallel_tool_calls=st.booleans(),
        thinking_token_budget=st.none() | tokens,
        cache_salt=text,
    )
)


@given(request_inputs)
def test_a_request_input_is_the_same_at_the_other_end(request_input: RequestInput) -> None:
    data = input_to_wire(request_input).SerializeToString()
    assert input_from_wire(pb.GenerateRequest.FromString(data)) == request_input


def test_an_empty_message_has_the_defaults() -> None:
    assert input_from_wire(pb.GenerateRequest()) == RequestInput()


@pytest.mark.parametrize(
    "request_input",
    [
        RequestInput(token_ids=(-1,)),
        RequestInput(token_ids=(2**32,)),
        RequestInput(text="\ud800"),
        RequestInput(text="a", max_tokens=-1),
        RequestInput(text="a", n=-1),
        RequestInput(text="a", logprobs=-1),
        RequestInput(text="a", priority=2**31),
        RequestInput(text="a", stop_token_ids=(-5,)),
        RequestInput(text="a", sampling={"seed": -1}),
        RequestInput(text="a", sampling={"logit_bias": {-1: 0.0}}),
        RequestInput(text="a", sampling={"temperature": "hot"}),  # type: ignore[typeddict-item]
    ],
)
def test_a_value_that_no_message_can_carry_is_the_callers_error(
    request_input: RequestInput,
) -> None:
    with pytest.raises(errors.InvalidRequestError, match="cannot be written"):
        input_to_wire(request_input)


logprobs32 = st.floats(max_value=0, width=32, allow_infinity=False)


@given(
    st.builds(
        Output,
        request_id=text,
        index=tokens,
        token_ids=st.lists(tokens).map(tuple),
        text=text,
        logprobs=st.lists(
            st.builds(
                lambda token, logprob, utf8, top: TokenLogprobs(
                    token,
                    logprob,
                    tuple((token, logprob) for token, logprob, _ in top),
                    tuple(utf8 for *_, utf8 in top),
                    utf8,
                ),
                tokens,
                logprobs32,
                st.binary(max_size=3),
                st.lists(st.tuples(tokens, logprobs32, st.binary(max_size=3)), max_size=2),
            ),
            max_size=2,
        ).map(tuple),
        finish_reason=st.sampled_from(FinishReason),
        matched_stop=text,
        usage=st.none() | st.builds(Usage, tokens, tokens, tokens),
    )
)
def test_an_output_is_the_same_at_the_other_end(output: Output) -> None:
    data = output_to_wire(output).SerializeToString()
    assert output_from_wire(pb.GenerateResponse.FromString(data)) == output


def test_an_unfinished_output_stays_unfinished() -> None:
    output = Output("r", 0, (1,), "a")
    assert output_from_wire(output_to_wire(output)) == output


def test_a_reason_of_a_newer_server_is_said_not_guessed() -> None:
    response = pb.GenerateResponse(request_id="r")
    response.finished.reason = 77  # type: ignore[assignment]
    with pytest.raises(errors.ServeError, match="reason 77, which this client does not know"):
        output_from_wire(response)


def test_model_info_is_the_same_at_the_other_end() -> None:
    info = ModelInfo(
        name="a", family="llama", scheme="fp8", kv_dtype="bf16", target="cpu:x", vocab_size=1,
        max_seq_len=2, max_batch_size=3, max_num_tokens=4, has_tokenizer=True,
        has_chat_template=False, eos_token_ids=(5, 6), page_size=7, num_pages=8,
        engine_digest="d", trtc_version="v", grammars=("x", "y"),
    )  # fmt: skip
    assert info_from_wire(info_to_wire(info)) == info


def failed(code: grpc.StatusCode, details: str, trailers: Any = ()) -> grpc.RpcError:
    """A call that ended with a status, as an asyncio client sees it."""
    return grpc.aio.AioRpcError(
        code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailers), details, ""
    )


SERVED = [
    (errors.InvalidRequestError, "INVALID_ARGUMENT"),
    (errors.QueueFullError, "RESOURCE_EXHAUSTED"),
    (errors.DeadlineError, "DEADLINE_EXCEEDED"),
    (errors.CancelledError, "CANCELLED"),
    (errors.NoTokenizerError, "FAILED_PRECONDITION"),
    (errors.UnknownModelError, "NOT_FOUND"),
    (errors.UnknownRequestError, "NOT_FOUND"),
    (errors.UnavailableError, "UNAVAILABLE"),
    (errors.EnvironmentFault, "FAILED_PRECONDITION"),
    (errors.RequestError, "INVALID_ARGUMENT"),
    (errors.UnsupportedError, "UNIMPLEMENTED"),
    (errors.EngineCorruptError, "FAILED_PRECONDITION"),
    (errors.EngineIncompatibleError, "FAILED_PRECONDITION"),
    (errors.HookError, "INTERNAL"),
    (errors.InvariantError, "INTERNAL"),
]


@pytest.mark.parametrize(("kind", "code"), SERVED)
def test_an_error_is_the_same_at_the_other_end(kind: type[errors.TrtcError], code: str) -> None:
    error = kind("is wrong ✗", field="prompt", remedy="Mend it")
    status = to_status(error)
    assert status.code.name == status_name(error) == code
    assert status.details == str(error)
    back = to_error(failed(status.code, status.details, status.trailing_metadata), "h:1")
    assert type(back) is kind
    assert (back.problem, back.field, back.remedy) == ("is wrong ✗", "prompt", "Mend it")


def test_a_huge_error_fits_the_metadata_limit() -> None:
    error = errors.InvalidRequestError("x" * 100_000, field="y" * 100_000, remedy="z" * 100_000)
    status = to_status(error)
    size = len(status.details) + sum(len(value) for _, value in status.trailing_metadata)
    assert size < 8192


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, errors.UnavailableError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlineError),
        (grpc.StatusCode.CANCELLED, errors.CancelledError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.QueueFullError),
        (grpc.StatusCode.UNIMPLEMENTED, errors.ServeError),
        (grpc.StatusCode.UNKNOWN, errors.ServeError),
    ],
)
def test_a_status_of_grpcs_own_becomes_the_nearest_error(
    code: grpc.StatusCode, kind: type[errors.TrtcError]
) -> None:
    error = to_error(failed(code, "some\nwords"), "host:1")
    assert type(error) is kind
    assert "some words" in str(error)


def test_an_unreachable_server_is_named() -> None:
    error = to_error(failed(grpc.StatusCode.UNAVAILABLE, "refused"), "host:1")
    assert error.field == "host:1"
    assert "trtc serve" in error.remedy


def test_details_that_contradict_the_status_are_not_believed() -> None:
    status = to_status(errors.InvalidRequestError("is wrong", field="prompt"))
    rewritten = failed(grpc.StatusCode.UNAVAILABLE, "proxy says no", status.trailing_metadata)
    assert type(to_error(rewritten, "host:1")) is errors.UnavailableError
