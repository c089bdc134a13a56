"""From an engine's thread to a reader: order, one wake-up, bounds, ends."""

import asyncio
import threading
from typing import Any

import pytest

from tests.support.aio import asynchronous
from trtc.protos.errors import QueueFullError, UnavailableError
from trtc.runtime.requests.request import FinishReason, Output, TokenLogprobs, Usage
from trtc.runtime.service.streams import Courier, OutputStream, merge

USAGE = Usage(3, 0, 4)


def output(index: int, *tokens: int, last: bool = False, usage: Usage | None = None) -> Output:
    return Output(
        request_id="r",
        index=index,
        token_ids=tokens,
        text="".join(chr(token) for token in tokens),
        logprobs=tuple(TokenLogprobs(token, -1.0, (), ()) for token in tokens),
        finish_reason=FinishReason.LENGTH if last else None,
        usage=usage,
    )


class Watched(OutputStream):
    """A stream that counts what it told its owner."""

    def __init__(self, max_unread_tokens: int = 1000) -> None:
        self.overflows = 0
        self.ends = 0
        self.seen = 0
        super().__init__(
            abort=lambda: None,
            max_unread_tokens=max_unread_tokens,
            on_failure=lambda _: self._count("overflows"),
            on_end=lambda _: self._count("ends"),
            on_output=lambda _, outputs, at: self._count("seen"),
        )

    def _count(self, name: str) -> None:
        setattr(self, name, getattr(self, name) + 1)


async def read(stream: OutputStream) -> list[Output]:
    return [one async for outputs in stream for one in outputs]


@asynchronous
async def test_a_reader_gets_every_output_in_order_then_the_end() -> None:
    stream = Watched()
    courier = Courier(asyncio.get_running_loop())

    def engine() -> None:
        for token in range(300):
            courier.post(stream, [output(0, 97 + token % 26)])
        courier.post(stream, [output(0, 33, last=True, usage=USAGE)])

    thread = threading.Thread(target=engine)
    thread.start()
    outputs = await read(stream)
    thread.join()
    text = "".join(one.text for one in outputs)
    assert text == "".join(chr(97 + token % 26) for token in range(300)) + "!"
    assert outputs[-1].usage == USAGE
    assert [one.usage for one in outputs[:-1]] == [None] * (len(outputs) - 1)
    assert stream.ended
    assert (stream.ends, stream.overflows) == (1, 0)


@asynchronous
async def test_many_deliveries_cost_one_wake_up(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    wakes = []
    courier = Courier(loop)
    wake = loop.call_soon_threadsafe

    def counted(*arguments: Any) -> asyncio.Handle:
        wakes.append(1)
        return wake(*arguments)

    monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
    streams = [Watched() for _ in range(100)]
    for stream in streams:
        courier.post(stream, [output(0, 65, last=True, usage=USAGE)])
    await asyncio.gather(*(read(stream) for stream in streams))
    assert len(wakes) == 1


@asynchronous
async def test_an_error_comes_after_what_was_delivered_before_it() -> None:
    stream = Watched()
    stream.deliver([output(0, 65)], 0.0)
    stream.deliver(UnavailableError("the device is gone"), 0.0)
    got = []
    with pytest.raises(UnavailableError, match="the device is gone"):
        async for outputs in stream:
            got.extend(outputs)
    assert [one.token_ids for one in got] == [(65,)]
    assert stream.ends == 1


@asynchronous
async def test_unread_tokens_beyond_the_bound_end_the_stream_once() -> None:
    stream = Watched(max_unread_tokens=4)
    for _ in range(10):
        stream.deliver([output(0, 65)], 0.0)
    assert stream.overflows == 1
    assert stream.seen == 10
    assert not stream.ended, "the engine still has it"
    with pytest.raises(QueueFullError, match="more than 4 tokens unread"):
        await read(stream)
    stream.deliver([output(0, last=True, usage=USAGE)], 0.0)
    assert stream.ended
    assert isinstance(stream.error, QueueFullError)
    assert stream.ends == 1


@asynchronous
async def test_reading_makes_room_again() -> None:
    stream = Watched(max_unread_tokens=4)
    for _ in range(50):
        stream.deliver([output(0, 65, 66, 67)], 0.0)
        assert (await anext(stream))[0].token_ids == (65, 66, 67)
    assert stream.overflows == 0


@asynchronous
async def test_a_closed_stream_keeps_nothing_but_still_ends() -> None:
    stream = Watched(max_unread_tokens=4)
    stream.close()
    for _ in range(100):
        stream.deliver([output(0, 65)], 0.0)
    stream.deliver(UnavailableError("gone"), 0.0)
    assert (stream.overflows, stream.ends, stream.error) == (0, 1, None)


def test_a_delivery_after_the_end_is_a_bug() -> None:
    async def late() -> None:
        stream = Watched()
        stream.deliver([output(0, 65, last=True, usage=USAGE)], 0.0)
        stream.deliver([output(0, 66)], 0.0)

    with pytest.raises(AssertionError, match="after the end"):
        asyncio.run(late())


def test_outputs_that_need_no_merging_are_left_alone() -> None:
    outputs = [output(1, 65), output(0, 66, last=True, usage=USAGE)]
    assert merge(outputs) == outputs


def test_merging_joins_each_sequence_and_keeps_usage_last() -> None:
    merged = merge([output(0, 65), output(1, 66, last=True), output(0, 67, last=True, usage=USAGE)])
    assert [(one.index, one.token_ids, one.text) for one in merged] == [
        (0, (65, 67), "AC"),
        (1, (66,), "B"),
    ]
    assert [len(one.logprobs) for one in merged] == [2, 1]
    assert [one.finish_reason for one in merged] == [FinishReason.LENGTH] * 2
    assert [one.usage for one in merged] == [None, USAGE]
