"""Running ahead: the device waits for nobody, and nobody can tell from the tokens."""

import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import pytest
from msgspec.structs import replace as with_fields

from tests.support.driver import solo_outputs
from tests.support.lazy import LazyEcho, LazyStep
from tests.support.loops import Inbox, Loop, running_loop
from tests.support.requests import greedy_request, sampled_request
from trtc.protos.errors import DeadlineError
from trtc.protos.sampling import SamplingParams
from trtc.runtime.engine.loop import Delivery, LoopConfig
from trtc.runtime.executors.base import StepBatch
from trtc.runtime.executors.echo import EchoExecutor, EchoOptions
from trtc.runtime.requests.completion import Completion
from trtc.runtime.requests.request import FinishReason, GenerationRequest
from trtc.runtime.sampling.sampler import SampledTokens, SamplingBatch

TINY = EchoOptions(
    vocab_size=64, num_pages=12, page_size=4, max_batch_size=5, max_seq_len=48, max_num_tokens=10
)
TINY_TEXT = replace(TINY, vocab_size=4096)
ROOMY = EchoOptions(vocab_size=64, num_pages=600)
PENALISED = SamplingParams(temperature=0.0, frequency_penalty=0.5, seed=0)


COUNTING = replace(ROOMY, counts_pending=True)


class Counting(LazyEcho):
    """Counts the rows that it was asked to draw, in `num_rows`."""

    num_rows = 0

    def queue(self, batch: StepBatch, sampling: SamplingBatch | None) -> LazyStep:
        self.num_rows += len(batch.logit_rows)
        return super().queue(batch, sampling)


def run(
    requests: list[GenerationRequest],
    options: EchoOptions = ROOMY,
) -> Counting:
    """Run requests that arrive together; all must be served right."""
    executor = Counting(options)
    loop = Loop(executor, None, LoopConfig())
    inboxes = [loop.send(request) for request in requests]
    loop.start()
    for request, inbox in zip(requests, inboxes, strict=True):
        outputs = [list(one.token_ids) for one in inbox.result().completions]
        assert outputs == solo_outputs(request, ROOMY)
    loop.stop()
    loop.check_integrity()
    return executor


def test_each_step_is_launched_before_the_last_one_is_complete() -> None:
    executor = run([greedy_request(f"r{i}", [i, i + 1], 20) for i in range(4)])
    assert executor.num_steps == 20
    assert executor.num_ahead == 19
    assert executor.num_pending_tokens == 4 * 19


def test_no_row_is_wasted_on_a_sequence_whose_length_is_its_end() -> None:
    lengths = (1, 1, 2, 3, 7, 16)
    executor = run([greedy_request(f"r{i}", [i], length) for i, length in enumerate(lengths)])
    assert executor.num_rows == sum(lengths)
    assert executor.num_steps == max(lengths)


def test_a_stop_costs_the_row_that_is_in_flight() -> None:
    tokens = EchoExecutor(ROOMY).greedy([1, 2, 3], 20)
    number = tokens.index(tokens[9]) + 1
    executor = run([greedy_request("r", [1, 2, 3], 20, stop_token_ids=(tokens[9],))])
    assert executor.num_rows == number + 1


def test_sequences_with_penalties_run_ahead_and_are_drawn_when_their_tokens_are_known() -> None:
    executor = run([GenerationRequest(f"p{i}", (i,), PENALISED, max_tokens=12) for i in range(3)])
    assert executor.num_steps == 12
    assert executor.num_pending_tokens == 3 * 11
    assert executor.num_drawn_late == 11


def test_penalties_that_count_pending_tokens_wait_for_nobody() -> None:
    penalised = [GenerationRequest(f"p{i}", (i,), PENALISED, max_tokens=12) for i in range(3)]
    plain = [greedy_request(f"r{i}", [i], 9) for i in range(2)]
    executor = run([*penalised, *plain], COUNTING)
    assert executor.num_steps == 12
    assert executor.num_ahead == 11
    assert executor.num_pending_tokens == 3 * 11 + 2 * 8
    assert executor.num_counted == 3 * 11
    assert executor.num_drawn_late == 0


def test_a_request_forks_before_it_runs_ahead() -> None:
    executor = run([sampled_request("r", [1, 2, 3], 10, n=3)])
    assert executor.num_steps == 10
    assert executor.num_ahead == 8, "all but the first and the one after the fork"
    assert executor.num_rows == 30


class Telling(LazyEcho):
    """Writes down its launches among the deliveries."""

    def __init__(self, options: EchoOptions) -> None:
        super().__init__(options)
        self.events: list[str] = []

    def queue(self, batch: StepBatch, sampling: SamplingBatch | None) -> LazyStep:
        self.events.append("launch")
        return super().queue(batch, sampling)


@pytest.mark.parametrize(
    "sampling", [SamplingParams(seed=0), PENALISED], ids=["plain", "penalised"]
)
def test_all_that_can_be_launched_is_before_a_step_is_told(sampling: SamplingParams) -> None:
    executor = Telling(ROOMY)
    with running_loop(executor=executor) as loop:
        inbox = Inbox()

        def sink(delivery: Delivery) -> None:
            executor.events.append("told")
            inbox(delivery)

        loop.submit(GenerationRequest("r", (1, 2), sampling, max_tokens=4), sink)
        inbox.result()
    order = "launch launch launch told launch told told told"
    assert executor.events == order.split()


class Doorbell(LazyEcho):
    """Calls `ring` while the first step is waited for, and writes down the sizes of its steps."""

    def __init__(self, options: EchoOptions) -> None:
        super().__init__(options)
        self.sizes: list[int] = []
        self.ring: Callable[[], object] = lambda: None

    def queue(self, batch: StepBatch, sampling: SamplingBatch | None) -> LazyStep:
        self.sizes.append(len(batch.token_ids))
        return super().queue(batch, sampling)

    def compute(self, batch: StepBatch, sampling: SamplingBatch) -> SampledTokens:
        if self.num_steps == 0:
            self.ring()
        return super().compute(batch, sampling)


def test_who_comes_during_a_step_is_in_the_next_that_is_launched() -> None:
    executor = Doorbell(ROOMY)
    late: list[Inbox] = []
    with running_loop(executor=executor) as loop:
        executor.ring = lambda: late.append(loop.send(greedy_request("late", [4, 5, 6], 1)))
        first = loop.send(greedy_request("first", [1, 2], 4))
        first.wait()
        late[0].wait()
    assert executor.sizes == [2, 1, 1 + 3, 1]


def draw_request(number: int, rng: random.Random, *, text: bool) -> GenerationRequest:
    """Anything that a request may ask for."""
    length, n = rng.randint(1, 20), rng.choice((1, 1, 1, 3))
    sampling = SamplingParams(
        temperature=rng.choice((0.7, 1.0) if n > 1 else (0.0, 0.7)),
        top_k=rng.choice((0, 5)),
        presence_penalty=rng.choice((0.0, 0.0, 0.0, 0.8)),
        logit_bias=rng.choice(({}, {7: 3.0})),
        seed=number,
    )
    return GenerationRequest(
        request_id=f"r{number}",
        prompt_ids=tuple(rng.choice((1, 1, 2)) for _ in range(length)),
        sampling=sampling,
        max_tokens=rng.randint(1, 48 - length),
        stop=rng.choice(((), ("e",), ("th", "s"))) if text else (),
        stop_token_ids=rng.choice(((), tuple(range(3, 4096, 24)) if text else (3, 15, 27))),
        include_stop=rng.random() < 0.5,
        ignore_eos=rng.random() < 0.5,
        n=n,
        logprobs=rng.choice((None, None, 2)),
        priority=rng.choice((0, 0, 2)),
    )


def completions(
    requests: list[GenerationRequest], *, ahead: bool, counts_pending: bool = False
) -> tuple[list[tuple[Completion, ...]], int]:
    """What requests that arrive a few at a time are told; and the number of preemptions."""
    config = LoopConfig(eos_token_ids=(5,))
    options = replace(TINY_TEXT, counts_pending=counts_pending)
    with running_loop(options, config, text=True, ahead=ahead) as loop:
        inboxes: list[Inbox] = []
        for number, request in enumerate(requests):
            inboxes.append(loop.send(request))
            if number % 8 == 7:
                inboxes[number - 4].wait()
        told = [inbox.result().completions for inbox in inboxes]
        return told, loop.stats().preemptions


@pytest.mark.parametrize(("seed", "counts_pending"), [(0, False), (1, True)])
def test_requests_are_told_the_same_as_in_step(seed: int, counts_pending: bool) -> None:
    """Stop strings, penalties, log-probabilities, forks and preemptions in twelve pages."""
    rng = random.Random(seed)
    requests = [draw_request(number, rng, text=True) for number in range(40)]
    in_step, _ = completions(requests, ahead=False)
    ahead, preemptions = completions(requests, ahead=True, counts_pending=counts_pending)
    assert ahead == in_step
    assert preemptions > 0
    reasons = {(one.finish_reason, bool(one.matched_stop)) for told in ahead for one in told}
    assert reasons == {(FinishReason.STOP, True), (FinishReason.LENGTH, False)}


class Client(threading.Thread):
    """Sends requests, and ends some of them at any moment."""

    def __init__(self, loop: Loop, name: int) -> None:
        super().__init__()
        self.sent: list[tuple[GenerationRequest, Inbox]] = []
        self._loop = loop
        self._rng = random.Random(name)
        self._first = name * 1000

    def run(self) -> None:
        rng = self._rng
        for number in range(self._first, self._first + 30):
            request = draw_request(number, rng, text=False)
            if rng.random() < 0.2:
                request = with_fields(request, deadline=time.monotonic() + rng.uniform(0.01, 0.1))
            with suppress(DeadlineError):  # it passed before the request was queued
                self.sent.append((request, self._loop.send(request)))
            time.sleep(rng.uniform(0, 0.01))
            victim, inbox = rng.choice(self.sent[-3:])
            if rng.random() < 0.5:
                inbox.first.wait(rng.choice((0, 10)))
                self._loop.abort(victim.request_id)


def test_aborts_and_deadlines_at_any_moment_leave_the_others_as_they_were() -> None:
    """Whoever ends early is told the beginning of its tokens, and everyone's end comes once."""
    with running_loop(replace(TINY, step_s=0.001), ahead=True) as loop:
        clients = [Client(loop, name) for name in range(4)]
        for client in clients:
            client.start()
        for client in clients:
            client.join(60)
        sent = [entry for client in clients for entry in client.sent]
        num_cut = 0
        for request, inbox in sent:
            inbox.wait()
            assert inbox.error is None or isinstance(inbox.error, DeadlineError)
            for index, whole in enumerate(solo_outputs(request, TINY)):
                mine = [output for output in inbox.outputs if output.index == index]
                told = [token for output in mine for token in output.token_ids]
                aborted = bool(mine) and mine[-1].finish_reason is FinishReason.ABORTED
                assert told == (whole[: len(told)] if aborted or inbox.error else whole)
                num_cut += 0 < len(told) < len(whole)
        stats = loop.stats()
    assert len(sent) == stats.requests_finished + stats.requests_failed > 100
    assert num_cut > 0


def test_stopping_waits_for_the_steps_in_flight() -> None:
    executor = LazyEcho(replace(ROOMY, step_s=0.005))
    with running_loop(executor=executor) as loop:
        inbox = loop.send(greedy_request("r", [1], 500))
        assert inbox.first.wait(10)
        loop.stop()
        assert executor.num_in_flight == 0
        assert inbox.wait().error is not None
