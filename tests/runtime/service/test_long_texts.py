"""Long texts and sequences: they hold nobody up, and what cannot fit is refused at once."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.support.aio import asynchronous
from tests.support.servers import CONFIG, TOKENIZER, EchoEngine, echo_server
from trtc.protos.errors import InvalidRequestError
from trtc.runtime.client import AsyncClient
from trtc.runtime.executors.echo import EchoOptions
from trtc.runtime.requests.principal import Principal
from trtc.runtime.service.limits import ServiceLimits
from trtc.runtime.service.prompts import MAX_DETOKENIZED
from trtc.runtime.text.tokenizer import Tokenizer

ENGINE = EchoEngine(EchoOptions(vocab_size=4096), tokenizer=TOKENIZER)


def turns_of_another_thread(work: Callable[[], object]) -> int:
    """How often this thread runs, pausing between, while another one does `work`."""
    thread = threading.Thread(target=work)
    thread.start()
    turns = 0
    while thread.is_alive():
        time.sleep(0.001)
        turns += 1
    return turns


def test_other_threads_run_while_a_long_text_is_tokenised_or_put_together() -> None:
    tokenizer = Tokenizer.load(TOKENIZER)
    text = "def f(x):\n    return x + 1  # once more\n" * 20_000
    # A call that kept the interpreter to itself would give one turn, at its end.
    assert turns_of_another_thread(lambda: tokenizer.encode(text)) > 5
    token_ids = tokenizer.encode(text)
    assert turns_of_another_thread(lambda: tokenizer.decode(token_ids)) > 5
    assert tokenizer.decode(token_ids).strip() == text.strip()


def test_long_texts_have_the_tokens_that_short_ones_have() -> None:
    tokenizer = Tokenizer.load(TOKENIZER)
    short = "for i in range(10):\n    print(i)\n" * 30
    long = short * 4
    assert len(short) < 2048 < len(long)
    library = tokenizer._fast.encode(long).ids
    assert list(tokenizer.encode(long)) == library
    assert tokenizer.decode(library) == tokenizer._fast.decode(library)


@asynchronous
async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encoded: list[int] = []
    encode = Tokenizer.encode

    def counted(self: Tokenizer, text: str, special: bool = True) -> tuple[int, ...]:
        encoded.append(len(text))
        return encode(self, text, special)

    monkeypatch.setattr(Tokenizer, "encode", counted)
    async with echo_server(ENGINE) as server, AsyncClient(server.address) as client:
        with pytest.raises(InvalidRequestError, match="more than 1024 tokens can have"):
            await client.generate("x" * 1_000_000, max_tokens=1).result()
        assert encoded == []
        longest = Tokenizer.load(TOKENIZER).longest_token
        with pytest.raises(InvalidRequestError, match="Shorten it"):
            await client.generate("x " * (512 * longest), max_tokens=1).result()
        assert encoded == [1024 * longest], "this one might have fitted"


@asynchronous
async def test_more_tokens_than_the_limit_are_not_put_together() -> None:
    config = replace(CONFIG, limits=ServiceLimits())
    async with (
        echo_server(ENGINE, config=config) as server,
        AsyncClient(server.address) as client,
    ):
        assert await client.detokenize([5] * 3000)
        too_many = [5] * (MAX_DETOKENIZED + 1)
        with pytest.raises(InvalidRequestError, match=f"more than {MAX_DETOKENIZED} numbers"):
            await client.detokenize(too_many)
        # Whatever a frontend lets through.
        with pytest.raises(InvalidRequestError, match=f"Give at most {MAX_DETOKENIZED}"):
            await server.server.service.detokenize("", too_many, False, Principal("a", "a"))
