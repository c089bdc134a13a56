"""Inputs become requests in one way: the same ids, the same refusals, whoever does the work."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.chats import chat_ids
from tests.support.servers import CONFIG, TOKENIZER, EchoEngine, open_echo
from trtc.protos.errors import InvalidRequestError, NoTokenizerError
from trtc.runtime.engine.admission import (
    SHORT_TEXT_CHARACTERS,
    Origin,
    PromptLimits,
    Work,
    admission,
    run_here,
)
from trtc.runtime.engine.handle import EngineHandle
from trtc.runtime.executors.echo import EchoOptions
from trtc.runtime.requests.principal import tenant
from trtc.runtime.requests.request import GenerationRequest
from trtc.runtime.requests.request_input import RequestInput
from trtc.runtime.text.chat import Chat, ChatMessage, ContentPart
from trtc.runtime.text.chat_options import chat_of
from trtc.runtime.text.tokenizer import Tokenizer

TEXT = "def f(x):\n"
LIMITS = PromptLimits(max_bytes=4000, max_messages=2)
HI = ChatMessage("user", "hi")


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineHandle]:
    handle = open_echo(EchoEngine(EchoOptions(vocab_size=4096), TOKENIZER), "echo", CONFIG.engine)
    yield handle
    handle.loop.stop()
    handle.close()


def admit(engine: EngineHandle, request_input: RequestInput, **limits: Any) -> GenerationRequest:
    return run_here(admission(engine, request_input, Origin(), PromptLimits(**limits)))


def test_a_text_becomes_its_tokens(engine: EngineHandle) -> None:
    request = admit(engine, RequestInput(text=TEXT, max_tokens=3))
    assert request.prompt_ids == Tokenizer.load(TOKENIZER).encode(TEXT)
    assert (request.max_tokens, request.deadline) == (3, None)


def test_token_ids_are_taken_as_they_are_without_work(engine: EngineHandle) -> None:
    work = admission(engine, RequestInput(token_ids=(5, 6)), Origin(), LIMITS)
    with pytest.raises(StopIteration) as done:
        next(work)
    assert done.value.value.prompt_ids == (5, 6)


def test_a_chat_is_rendered_and_then_tokenised(engine: EngineHandle) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    chat = chat_of(messages, {})
    steps: list[Work] = []
    running = admission(engine, RequestInput(chat=chat), Origin(), LIMITS)
    result: Any = None
    with pytest.raises(StopIteration) as done:
        while True:
            steps.append(running.send(result))
            result = steps[-1].run()
    assert [step.renders for step in steps] == [True, False]
    text = steps[0].run()
    assert steps[1].num_characters == len(text)
    tokenizer = Tokenizer.load(TOKENIZER)
    assert done.value.value.prompt_ids == chat_ids(tokenizer, chat)
    tokenizer.close()


def test_the_origin_is_the_requests(engine: EngineHandle) -> None:
    origin = Origin(tenant("a"), deadline=7.0, share_prefixes=True)
    request = run_here(admission(engine, RequestInput(token_ids=(5,)), origin, LIMITS))
    assert (request.principal, request.deadline) == (tenant("a"), 7.0)
    assert request.share_prefixes


def test_requests_that_name_no_id_get_one_each(engine: EngineHandle) -> None:
    request_input = RequestInput(token_ids=(5,))
    assert len({admit(engine, request_input).request_id for _ in range(3)} - {""}) == 3
    assert admit(engine, RequestInput(token_ids=(5,), request_id="mine")).request_id == "mine"


@pytest.mark.parametrize(
    ("request_input", "message"),
    [
        (RequestInput(), "prompt: is missing"),
        (RequestInput(text="x" * 4001), "prompt.text: has 4001 bytes"),
        (RequestInput(chat=Chat((HI,) * 3)), "chat.messages: has 3 messages"),
        (RequestInput(chat=Chat((ChatMessage("user", "x" * 4000),))), "chat: has 4004 bytes"),
        (
            RequestInput(chat=Chat((ChatMessage("user", parts=(ContentPart("", "image_url"),)),))),
            r"chat\.messages\[0\]\.parts\[0\]\.type: 'image_url' is not supported",
        ),
    ],
)
def test_what_is_refused_is_named(
    request_input: RequestInput, message: str, engine: EngineHandle
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        run_here(admission(engine, request_input, Origin(), LIMITS))


def test_a_long_text_that_cannot_fit_is_refused_untokenised(engine: EngineHandle) -> None:
    tokenizer = engine.tokenizer_for("text")
    size = max(SHORT_TEXT_CHARACTERS, engine.loop.bounds.max_context * tokenizer.longest_token) + 1
    with pytest.raises(InvalidRequestError, match="tokens can have"):
        admit(engine, RequestInput(text="x" * size))


def test_half_a_surrogate_pair_is_refused(engine: EngineHandle) -> None:
    with pytest.raises(InvalidRequestError, match="not valid Unicode"):
        admit(engine, RequestInput(text="a\ud800"))


def test_without_a_tokenizer_text_is_refused_and_token_ids_are_not() -> None:
    handle = open_echo(EchoEngine(), "mute", CONFIG.engine)
    try:
        for request_input in (RequestInput(text="x"), RequestInput(chat=Chat((HI,)))):
            with pytest.raises(NoTokenizerError, match="mute was built without a tokenizer"):
                admit(handle, request_input)
        assert admit(handle, RequestInput(token_ids=(5,))).prompt_ids == (5,)
    finally:
        handle.loop.stop()
        handle.close()
