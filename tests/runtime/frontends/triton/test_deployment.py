"""Calls in flight together over one engine loop: answers, errors, cancellation, the end."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from tests.support.loops import PATIENCE_S
from tests.support.servers import CONFIG, EOS, TOKENIZER, EchoEngine, greedy, open_echo
from tests.support.tensors import tensor, tensors
from trtc.protos.errors import (
    DeadlineError,
    InvalidRequestError,
    InvariantError,
    QueueFullError,
    TrtcError,
    UnavailableError,
)
from trtc.runtime.engine.loop import LoopStats
from trtc.runtime.executors.echo import EchoOptions
from trtc.runtime.frontends.triton.deployment import Call, Deployment
from trtc.runtime.frontends.triton.settings import Settings
from trtc.runtime.tensors.replies import Message, RowReplies

PROMPT = [5, 17, 9]


@dataclass(eq=False)
class Client:
    """The far end of a call, which must be told rightly."""

    messages: list[Message] = field(default_factory=list)
    error: TrtcError | None = None
    cancelled: bool = False
    breaks: bool = False
    ended: threading.Event = field(default_factory=threading.Event)

    def send(self, message: Message | TrtcError, *, final: bool) -> None:
        assert not self.ended.is_set(), "sent after the final message"
        if isinstance(message, TrtcError):
            assert final
            self.error = message
        else:
            self.messages.append(message)
        if final:
            self.ended.set()
        if self.breaks:
            raise OSError("the response could not be sent")

    def is_cancelled(self) -> bool:
        assert not self.ended.is_set(), "asked after the final message"
        return self.cancelled

    def wait(self) -> "Client":
        assert self.ended.wait(PATIENCE_S), "the call never ended"
        return self

    def token_ids(self, **index: int) -> list[int]:
        """Of all messages, or of those with this batch_index or sequence_index."""
        self.wait()
        assert self.error is None, self.error
        return [
            token
            for message in self.messages
            if all(message[name].tolist() == [[value]] for name, value in index.items())
            for token in message["output_ids"][0][0].tolist()
        ]

    def failure(self) -> TrtcError:
        self.wait()
        assert self.error is not None
        return self.error


@dataclass(eq=False)
class Model:
    deployment: Deployment
    stats: list[LoopStats]

    def call(
        self, client: Client | None = None, request_id: str = "", timeout_s: float | None = None,
        **inputs: Any,
    ) -> Client:  # fmt: skip
        return self.send(tensors(**inputs), client, request_id, timeout_s)

    def send(
        self,
        batch: Any,
        client: Client | None = None,
        request_id: str = "",
        timeout_s: float | None = None,
    ) -> Client:
        client = client or Client()
        self.deployment.start(Call(request_id, batch, timeout_s, client))
        return client

    def wait_for(self, condition: Callable[[LoopStats], bool]) -> LoopStats:
        deadline = time.monotonic() + PATIENCE_S
        while not condition(stats := self.deployment._handle.loop.stats()):
            assert time.monotonic() < deadline, stats
            time.sleep(0.002)
        return stats


@contextmanager
def model(
    options: EchoOptions | None = None,
    *,
    text: bool = False,
    max_queue: int = 1024,
    ends_idle: bool = True,
) -> Iterator[Model]:
    """A deployment over the echo executor.

    Args:
        ends_idle: on the way out no page may be held.
    """
    engine = EchoEngine(options or EchoOptions(never=(EOS,)), TOKENIZER if text else None)
    handle = open_echo(engine, "echo", replace(CONFIG.engine, max_queue=max_queue))
    stats: list[LoopStats] = []
    deployment = Deployment(handle, Settings(cancellation_check_period_ms=5), on_stats=stats.append)
    served = Model(deployment, stats)
    try:
        yield served
        if ends_idle:
            served.wait_for(lambda stats: not stats.pages_used and not stats.waiting)
    finally:
        deployment.close()
    assert not deployment._live


def asked(max_tokens: int, **inputs: Any) -> dict[str, Any]:
    return {"input_ids": PROMPT, "request_output_len": max_tokens, **inputs}


def test_a_streamed_answer_is_the_engines_tokens_one_a_message() -> None:
    with model() as served:
        client = served.call(**asked(12, streaming=True)).wait()
    assert client.token_ids() == greedy(PROMPT, 12)
    assert [message["sequence_length"].tolist() for message in client.messages] == [[[1]]] * 12


def test_an_unstreamed_answer_is_one_message() -> None:
    with model(text=True) as served:
        client = served.call(**asked(12)).wait()
        streamed = served.call(**asked(12, streaming=True)).wait()
    assert client.token_ids() == greedy(PROMPT, 12)
    (message,) = client.messages
    assert message["finish_reason"].tolist() == [b"length"]
    texts = [one["text_output"][0] for one in streamed.messages]
    assert b"".join(texts) == message["text_output"][0] != b""


def test_calls_run_in_one_batch() -> None:
    with model(EchoOptions(never=(EOS,), step_s=0.002)) as served:
        clients = [served.call(**asked(40 + n, streaming=True)) for n in range(8)]
        running = served.wait_for(lambda stats: stats.running == 8)
        answers = [client.token_ids() for client in clients]
    assert running.waiting == 0
    assert answers == [greedy(PROMPT, 40 + n) for n in range(8)]


def test_rows_of_a_batch_end_in_one_final_message() -> None:
    prompts, lengths = [[5, 17, 9], [8, 9, 0]], [4, 9]
    batch = {
        "input_ids": tensor("input_ids", prompts),
        "input_lengths": tensor("input_lengths", [3, 2]),
        "request_output_len": tensor("request_output_len", lengths),
        "streaming": tensor("streaming", [True, False]),
    }
    with model() as served:
        client = served.send(batch).wait()
    assert client.token_ids(batch_index=0) == greedy([5, 17, 9], 4)
    assert client.token_ids(batch_index=1) == greedy([8, 9], 9)
    assert len(client.messages) == 4 + 1


def test_samples_of_one_prompt_say_which_they_are() -> None:
    with model() as served:
        client = served.call(**asked(6, num_return_sequences=2, runtime_top_k=50, seed=1)).wait()
    first, second = (client.token_ids(sequence_index=index) for index in range(2))
    assert len(first) == len(second) == 6
    assert first != second


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"input_ids": [5, 512]}, "input_ids: token id 512"),
        ({"input_ids": [5] * 1024}, "input_ids: has 1024 tokens"),
        (asked(0), "request_output_len: is 0"),
        ({"input_ids": [5], "max_tokens": 9999}, "max_tokens: is 9999"),
        (asked(5, runtime_top_p=1.5), "runtime_top_p: is 1.5"),
        (asked(5, num_return_sequences=2), "num_return_sequences: 2 sequences at temperature 0"),
        (asked(5, end_id=600), "end_id: token id 600"),
        (asked(5, embedding_bias=[200.0] * 512), "embedding_bias: is 200.0"),
        ({"text_input": "a"}, "text_input: engine echo was built without a tokenizer"),
    ],
    ids=str,
)
def test_errors_name_the_inputs_of_the_client(inputs: dict[str, Any], message: str) -> None:
    with model() as served:
        client = served.call(**inputs).wait()
    assert str(client.failure()).startswith(message)
    assert client.messages == []


def test_stop_words_are_named_in_errors() -> None:
    with model(text=True) as served:
        many = served.call(text_input="a", stop_words=[str(n) for n in range(17)])
        empty = served.call(text_input="")
    assert str(many.failure()).startswith("stop_words (how many): is 17")
    assert str(empty.failure()).startswith("text_input: has no tokens")


def test_a_row_that_is_wrong_keeps_the_whole_batch_out() -> None:
    batch = {"input_ids": tensor("input_ids", [[5], [600]])}
    with model() as served:
        assert "token id 600" in str(served.send(batch).failure())
        assert served.wait_for(lambda stats: True).requests_admitted == 0


def test_rows_that_were_admitted_end_when_the_queue_is_full() -> None:
    batch = {
        "input_ids": tensor("input_ids", [[5]] * 3),
        "max_tokens": tensor("max_tokens", [900] * 3),
    }
    with model(EchoOptions(never=(EOS,), step_s=0.3), max_queue=2) as served:
        running = served.call(**asked(2, streaming=True))
        while not running.messages:  # now its second step keeps the loop from the queue
            time.sleep(0.001)
        assert isinstance(served.send(batch).failure(), QueueFullError)
        stats = served.wait_for(lambda stats: stats.requests_finished == 3)
    assert stats.generated_tokens <= 2 + 2


def test_the_client_is_told_when_its_time_is_up() -> None:
    with model(EchoOptions(never=(EOS,), step_s=0.005)) as served:
        client = served.call(timeout_s=0.1, **asked(900, streaming=True))
        assert isinstance(client.failure(), DeadlineError)
    assert str(client.failure()).startswith("timeout: passed")
    assert client.messages


def test_a_cancelled_call_frees_its_pages() -> None:
    with model(EchoOptions(never=(EOS,), step_s=0.002)) as served:
        client = served.call(**asked(1000, streaming=True))
        served.wait_for(lambda stats: stats.pages_used > 0)
        client.cancelled = True
        stats = served.wait_for(lambda stats: stats.pages_used == 0)
        client.wait()
    assert stats.generated_tokens < 900
    assert client.messages[-1]["finish_reason"].tolist() == [b"aborted"]


def test_a_stop_request_ends_the_calls_of_its_id() -> None:
    with model(EchoOptions(never=(EOS,), step_s=0.002)) as served:
        mine, same, other = (
            served.call(request_id=name, **asked(1000, streaming=True)) for name in "aab"
        )
        served.wait_for(lambda stats: stats.running == 3)
        stop = served.call(request_id="a", input_ids=[0], input_lengths=0, stop=True).wait()
        for client in (mine, same):
            assert client.wait().messages[-1]["finish_reason"].tolist() == [b"aborted"]
        assert not other.ended.is_set()
        assert stop.messages == [{}]
        unnamed = served.call(input_ids=[0], stop=True)
        assert isinstance(unnamed.failure(), InvalidRequestError)
        other.cancelled = True
        other.wait()


def test_a_client_that_cannot_be_reached_harms_no_other() -> None:
    with model() as served:
        broken = served.call(Client(breaks=True), **asked(8, streaming=True))
        sound = served.call(**asked(8, streaming=True))
        broken.wait()
        assert sound.token_ids() == greedy(PROMPT, 8)
        assert served.call(**asked(3)).token_ids() == greedy(PROMPT, 3)


def test_closing_ends_what_runs() -> None:
    with model(EchoOptions(never=(EOS,), step_s=0.002), ends_idle=False) as served:
        client = served.call(**asked(1000, streaming=True))
        served.wait_for(lambda stats: stats.running == 1)
    assert isinstance(client.failure(), UnavailableError)


def test_a_dead_engine_answers_with_an_error() -> None:
    with model(EchoOptions(never=(EOS,), fail_at_step=3), ends_idle=False) as served:
        client = served.call(**asked(1000, streaming=True))
        assert isinstance(client.failure(), UnavailableError)
        assert isinstance(served.call(**asked(3)).failure(), UnavailableError)


def test_a_fault_of_our_own_is_said_and_ends_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(replies: RowReplies, outputs: object) -> list[Message]:
        raise ZeroDivisionError

    with model() as served:
        unreadable = {"input_ids": tensor("input_ids", [PROMPT]), "top_k": ["no array"]}
        assert isinstance(served.send(unreadable).failure(), InvariantError)
        with monkeypatch.context() as patch:
            patch.setattr(RowReplies, "messages", fail)
            assert isinstance(served.call(**asked(3)).failure(), InvariantError)
        assert served.call(**asked(3)).token_ids() == greedy(PROMPT, 3)


def test_statistics_go_out_while_calls_run_and_when_the_last_ends() -> None:
    with model(EchoOptions(never=(EOS,), step_s=0.002)) as served:
        served.call(**asked(50, streaming=True)).wait()
        served.call(**asked(1)).wait()
    assert max(stats.running for stats in served.stats) == 1
    assert served.stats[-1].running == 0
    assert served.stats[-1].requests_finished == 2


def test_a_storm_of_calls_leaves_nothing_behind() -> None:
    random = np.random.default_rng(3)
    options = EchoOptions(never=(EOS,), num_pages=48, max_batch_size=8, step_s=0.0002)
    with model(options) as served:
        clients = []
        for number in range(120):
            length = int(random.integers(1, 40))
            client = served.call(
                request_id=str(number % 7), **asked(length, streaming=bool(random.integers(2)))
            )
            clients.append((client, length))
            if random.random() < 0.2:
                client.cancelled = True
            if random.random() < 0.05:
                served.call(request_id=str(random.integers(7)), input_ids=[0], stop=True).wait()
        for client, length in clients:
            tokens = client.token_ids()
            assert tokens == greedy(PROMPT, length)[: len(tokens)]
            assert len(tokens) == length or client.messages[-1]["finish_reason"] == [b"aborted"]
