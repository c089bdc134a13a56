"""The engine loop: every request ends once, whatever callers, sinks and executors do."""

import itertools
import random
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Protocol

import numpy as np
import pytest
from msgspec.structs import replace as with_fields

from tests.support.driver import solo_outputs
from tests.support.lazy import LazyEcho
from tests.support.loops import PYLLAMA, Inbox, Loop, running_loop
from tests.support.requests import greedy_request, sampled_request
from trtc.protos.errors import (
    DeadlineError,
    EnvironmentFault,
    InvalidRequestError,
    InvariantError,
    NoTokenizerError,
    QueueFullError,
    TrtcError,
    UnavailableError,
)
from trtc.protos.sampling import SamplingParams
from trtc.runtime.engine.loop import Delivery, LoopConfig
from trtc.runtime.executors.base import Float32s, StepBatch
from trtc.runtime.executors.echo import EchoExecutor, EchoOptions, context_state
from trtc.runtime.requests.request import FinishReason, GenerationRequest, Output
from trtc.runtime.text.tokenizer import Tokenizer

SMALL = EchoOptions(
    vocab_size=64, num_pages=12, page_size=4, max_batch_size=5, max_seq_len=48, max_num_tokens=10
)
ROOMY = EchoOptions(vocab_size=512, num_pages=600, max_batch_size=64)
SLOW = replace(ROOMY, step_s=0.01)
TEXT = EchoOptions(vocab_size=4096, num_pages=600, max_batch_size=8)


class OpenLoop(Protocol):
    """`running_loop`, for one kind of executor."""

    def __call__(
        self,
        options: EchoOptions | None = None,
        config: LoopConfig | None = None,
        *,
        text: bool = False,
        executor: EchoExecutor | None = None,
    ) -> AbstractContextManager[Loop]: ...


@pytest.fixture(params=[False, True], ids=["in_step", "ahead"])
def ahead(request: pytest.FixtureRequest) -> bool:
    """Whether the executor runs ahead."""
    return bool(request.param)


@pytest.fixture
def open_loop(ahead: bool) -> OpenLoop:
    return partial(running_loop, ahead=ahead)


def test_tokens_equal_solo_runs_in_a_crowded_pool(open_loop: OpenLoop) -> None:
    rng = random.Random(5)
    requests = []
    for number in range(60):
        prompt = [rng.choice((1, 1, 2)) for _ in range(rng.randint(1, 24))]
        if number % 3:
            requests.append(greedy_request(f"r{number}", prompt, rng.randint(1, 24)))
        else:
            requests.append(
                sampled_request(f"r{number}", prompt, 20, seed=number, n=1 + number % 3)
            )
    with open_loop(SMALL) as loop:
        inboxes = [loop.send(request) for request in requests]
        for request, inbox in zip(requests, inboxes, strict=True):
            outputs = [list(one.token_ids) for one in inbox.result().completions]
            assert outputs == solo_outputs(request, SMALL)
            assert inbox.result().usage.completion_tokens == sum(map(len, outputs))
            assert inbox.result().usage.prompt_tokens == len(request.prompt_ids)
            queue_s = inbox.result().usage.queue_s
            assert queue_s is not None
            assert queue_s <= inbox.first_at - inbox.made_at, (
                "waiting after a preemption counts not"
            )
        assert loop.drain(5)
        stats = loop.stats()
        assert stats.preemptions > 0
        assert stats.requests_finished == len(requests)


def test_sampling_parameters_reach_the_sampler_across_preemptions(open_loop: OpenLoop) -> None:
    """Penalties count what a sequence has seen, also after it was computed again."""
    params = SamplingParams(
        temperature=0.8,
        top_k=30,
        min_p=0.01,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.7,
        logit_bias={3: 4.0, 9: -50.0},
        seed=77,
    )
    requests = [
        GenerationRequest(f"r{number}", (1,) * (number + 1), params, max_tokens=24, n=2)
        for number in range(8)
    ]
    with open_loop(SMALL) as loop:
        inboxes = [loop.send(request) for request in requests]
        for request, inbox in zip(requests, inboxes, strict=True):
            outputs = [list(one.token_ids) for one in inbox.result().completions]
            assert outputs == solo_outputs(request, SMALL)
            assert not any(9 in output for output in outputs)
        assert loop.stats().preemptions > 0


def test_a_strong_frequency_penalty_forbids_repetition(open_loop: OpenLoop) -> None:
    params = SamplingParams(
        temperature=0.0, frequency_penalty=2.0, repetition_penalty=100.0, seed=0
    )
    with open_loop(SMALL) as loop:
        result = loop.send(GenerationRequest("r", (5, 6), params, max_tokens=40)).result()
    assert len(set(result.token_ids)) == 40
    assert not {5, 6} & set(result.token_ids)


def test_nothing_ends_a_sequence_before_its_least_number_of_tokens(open_loop: OpenLoop) -> None:
    echo = EchoExecutor(ROOMY)
    free = list(echo.greedy((1, 2), 6))
    eos, stop = free[1], free[2]
    masked = [1, 2]
    for _ in range(9):
        masked.append(likeliest(echo, masked, {eos, stop} if len(masked) < 2 + 8 else set()))
    with open_loop(ROOMY, LoopConfig(eos_token_ids=(eos,))) as loop:
        ends = loop.send(greedy_request("ends", (1, 2), 9, stop_token_ids=(stop,)))
        goes_on = loop.send(greedy_request("on", (1, 2), 9, stop_token_ids=(stop,), min_tokens=8))
        ignores = loop.send(greedy_request("ignores", (1, 2), 6, ignore_eos=True, min_tokens=6))
        asked = greedy_request("asked", (1, 2), 9, stop_token_ids=(stop,), min_tokens=2, logprobs=1)
        logprobs = loop.send(asked).result().logprobs
        assert list(ends.result().token_ids) == free[:2]
        assert list(goes_on.result().token_ids) == masked[2:]
        assert list(ignores.result().token_ids) == free
        assert logprobs[1].top[0][0] == eos, "the model's own distribution"
        assert logprobs[1].token_id != eos


def likeliest(echo: EchoExecutor, token_ids: list[int], masked: set[int]) -> int:
    """Of the tokens that are not masked."""
    logits = echo._logits_of(np.array([context_state(np.array(token_ids))], np.uint64))[0]
    logits[list(masked)] = -np.inf
    return int(logits.argmax())


def test_a_stop_string_counts_after_the_least_number_of_tokens(open_loop: OpenLoop) -> None:
    with open_loop(TEXT, text=True) as loop:
        free = loop.send(greedy_request("free", (1, 2), 12)).result()
        texts = [
            entry.text
            for entry in loop.send(greedy_request("logprobs", (1, 2), 12, logprobs=0))
            .result()
            .logprobs
        ]
        stop = texts[1]
        early = loop.send(greedy_request("early", (1, 2), 12, stop=(stop,))).result()
        late = loop.send(greedy_request("late", (1, 2), 12, stop=(stop,), min_tokens=3)).result()
    assert "".join(texts) == free.text
    assert len(early.token_ids) <= 2 < len(late.token_ids)
    assert late.text.startswith(free.text[: len("".join(texts[:3]))])


def prompt_scores(prompt_ids: tuple[int, ...], options: EchoOptions) -> list[tuple[int, float]]:
    """The prompt's tokens from the second on, and their log-probabilities."""
    echo, scores = EchoExecutor(options), []
    for length in range(1, len(prompt_ids)):
        state = context_state(np.array(prompt_ids[:length]))
        logits = echo._logits_of(np.array([state], np.uint64))[0].astype(np.float64)
        normaliser = float(np.log(np.exp(logits).sum()))
        token = prompt_ids[length]
        scores.append((token, float(logits[token]) - normaliser))
    return scores


def test_prompt_logprobs_are_those_of_each_token_given_the_ones_before(
    open_loop: OpenLoop,
) -> None:
    """In chunks of as many tokens as a step has rows left, among others, across preemptions."""
    rng = random.Random(11)
    requests = []
    for number in range(30):
        prompt = tuple(rng.randrange(32) for _ in range(rng.randint(1, 24)))
        fields = {"prompt_logprobs": rng.choice((0, 3)), "logprobs": 1} if number % 2 else {}
        n = 1 + number % 2 * (number % 3)
        requests.append(sampled_request(f"r{number}", prompt, 20, seed=number, n=n, **fields))
    requests.append(requests[1])
    with open_loop(SMALL) as loop:
        inboxes = [
            loop.send(with_fields(request, request_id=f"{at}"))
            for at, request in enumerate(requests)
        ]
        for request, inbox in zip(requests, inboxes, strict=True):
            result = inbox.result()
            assert [list(one.token_ids) for one in result.completions] == solo_outputs(
                request, SMALL
            )
            if request.prompt_logprobs is None:
                assert result.prompt_logprobs == ()
                continue
            assert result.usage.cached_prompt_tokens == 0
            found = [(entry.token_id, entry.logprob) for entry in result.prompt_logprobs]
            expected = prompt_scores(request.prompt_ids, SMALL)
            assert [token for token, _ in found] == [token for token, _ in expected]
            assert [value for _, value in found] == pytest.approx(
                [value for _, value in expected], abs=1e-4
            )
            for entry in result.prompt_logprobs:
                assert len(entry.top) == request.prompt_logprobs
                assert all(value >= entry.logprob for _, value in entry.top[:1])
        assert loop.stats().preemptions > 0


def test_prompt_logprobs_come_before_the_first_token_and_once(open_loop: OpenLoop) -> None:
    with open_loop(ROOMY) as loop:
        inbox = loop.send(greedy_request("r", range(400), 4, prompt_logprobs=0)).wait()
        again = loop.send(greedy_request("again", range(400), 1))
        cached = again.result().usage.cached_prompt_tokens
    scored = [len(output.prompt_logprobs) for output in inbox.outputs]
    drawn = [len(output.token_ids) for output in inbox.outputs]
    assert sum(scored) == 399
    assert max(scored) <= ROOMY.max_batch_size, "a step has no more rows"
    assert not any(scored[drawn.index(1) :])
    assert cached > 0, "others may use what was computed"


class Unable(EchoExecutor):
    """Its model can never give token 7."""

    def logits(self, batch: StepBatch) -> Float32s:
        logits = super().logits(batch)
        logits[:, 7] = -np.inf
        return logits


def test_a_prompt_token_that_the_model_cannot_give_has_minus_infinity() -> None:
    with running_loop(executor=Unable(ROOMY)) as loop:
        result = loop.send(greedy_request("r", (5, 7, 9), 2, prompt_logprobs=0)).result()
    impossible, possible = result.prompt_logprobs
    assert (impossible.token_id, impossible.logprob) == (7, -np.inf)
    assert possible.token_id == 9
    assert np.isfinite(possible.logprob)


def test_requests_without_a_seed_differ(open_loop: OpenLoop) -> None:
    with open_loop(ROOMY) as loop:
        requests = [
            GenerationRequest(f"r{i}", (1, 2), SamplingParams(), max_tokens=8) for i in range(4)
        ]
        outputs = {loop.send(request).result().token_ids for request in requests}
    assert len(outputs) == 4


def test_a_prompt_seen_before_is_reported_as_cached(open_loop: OpenLoop) -> None:
    with open_loop(ROOMY) as loop:
        first = loop.send(greedy_request("a", [7] * 40, 4)).result()
        second = loop.send(greedy_request("b", [7] * 40, 4)).result()
    assert first.usage.cached_prompt_tokens == 0
    assert second.usage.cached_prompt_tokens == 32
    assert first.token_ids == second.token_ids
    with open_loop(ROOMY, LoopConfig(prefix_cache=False)) as loop:
        loop.send(greedy_request("a", [7] * 40, 4)).result()
        assert loop.send(greedy_request("b", [7] * 40, 4)).result().usage.cached_prompt_tokens == 0


def test_logprobs_belong_to_their_tokens(open_loop: OpenLoop) -> None:
    with open_loop(ROOMY) as loop:
        plain = loop.send(greedy_request("plain", [3, 4], 5))
        asked = loop.send(greedy_request("asked", [1, 2], 5, logprobs=3))
        zero = loop.send(greedy_request("zero", [1, 2], 5, logprobs=0))
        result = asked.result()
        assert len(result.logprobs) == 5
        for token, entry in zip(result.token_ids, result.logprobs, strict=True):
            assert entry.token_id == token == entry.top[0][0]
            assert entry.logprob == pytest.approx(entry.top[0][1])
            assert len(entry.top) == 3
            assert [value for _, value in entry.top] == sorted(
                (value for _, value in entry.top), reverse=True
            )
        assert plain.result().logprobs == ()
        assert [entry.top for entry in zero.result().logprobs] == [()] * 5


# Text.


def text_of(tokens: tuple[int, ...]) -> str:
    return Tokenizer.load(PYLLAMA).decode(tokens)


def test_text_comes_with_the_tokens(open_loop: OpenLoop) -> None:
    with open_loop(TEXT, text=True) as loop:
        result = loop.send(greedy_request("r", [5, 6], 60)).result()
    assert result.text == text_of(result.token_ids)
    assert result.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("include_stop", [False, True])
def test_a_stop_string_across_tokens_ends_the_text(open_loop: OpenLoop, include_stop: bool) -> None:
    with open_loop(TEXT, text=True) as loop:
        whole = loop.send(greedy_request("whole", [5, 6], 60)).result()
        at = len(whole.text) // 2
        stop = whole.text[at : at + 7]
        request = greedy_request("cut", [5, 6], 60, stop=(stop, "never"), include_stop=include_stop)
        inbox = loop.send(request)
        cut = inbox.result()
    end = whole.text.index(stop) + (len(stop) if include_stop else 0)
    assert cut.text == whole.text[:end]
    assert cut.finish_reason is FinishReason.STOP
    assert cut.completions[0].matched_stop == stop
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    assert len(cut.token_ids) < len(whole.token_ids)
    assert cut.usage.completion_tokens == len(cut.token_ids)
    streamed = itertools.accumulate(output.text for output in inbox.outputs)
    assert all(whole.text[:end].startswith(seen) for seen in streamed)


@pytest.mark.parametrize("include_stop", [False, True])
def test_stop_tokens_leave_the_text_unless_wanted(open_loop: OpenLoop, include_stop: bool) -> None:
    with open_loop(TEXT, text=True) as loop:
        whole = loop.send(greedy_request("whole", [5, 6], 20)).result()
        stop = whole.token_ids[10]
        request = greedy_request(
            "cut", [5, 6], 20, stop_token_ids=(stop,), include_stop=include_stop
        )
        cut = loop.send(request).result()
    end = whole.token_ids.index(stop)
    assert cut.token_ids == whole.token_ids[: end + 1]
    assert cut.text == text_of(whole.token_ids[: end + include_stop])
    assert cut.completions[0].matched_stop == text_of((stop,))


def test_end_of_sequence_tokens_end_it_unless_ignored(open_loop: OpenLoop) -> None:
    echo = EchoExecutor(ROOMY)
    tokens = echo.greedy([1, 2, 3], 12)
    with open_loop(ROOMY, LoopConfig(eos_token_ids=(tokens[4],))) as loop:
        ended = loop.send(greedy_request("a", [1, 2, 3], 12)).result()
        ignored = loop.send(greedy_request("b", [1, 2, 3], 12, ignore_eos=True)).result()
    assert ended.token_ids == tokens[: tokens.index(tokens[4]) + 1]
    assert ended.finish_reason is FinishReason.STOP
    assert ignored.token_ids == tokens


def test_stop_strings_need_a_tokenizer(open_loop: OpenLoop) -> None:
    with open_loop(ROOMY) as loop, pytest.raises(NoTokenizerError, match="stop"):
        loop.send(greedy_request("r", [1], 4, stop=("x",)))


# Ends that are not the request's own.


def test_an_aborted_request_ends_with_what_it_has(open_loop: OpenLoop) -> None:
    with open_loop(SLOW) as loop:
        inbox = loop.send(sampled_request("r", [1, 2, 3], 1000, n=3))
        assert inbox.first.wait(10)
        assert loop.abort("r")
        result = inbox.result()
        assert [one.finish_reason for one in result.completions] == [FinishReason.ABORTED] * 3
        assert 0 < result.usage.completion_tokens < 3000
        assert not loop.abort("r")
        assert not loop.abort("unknown")
        assert loop.drain(5)
        assert loop.stats().pages_used == 0


def test_a_waiting_request_can_be_aborted(open_loop: OpenLoop) -> None:
    options = replace(SLOW, max_batch_size=1)
    with open_loop(options) as loop:
        running = loop.send(greedy_request("running", [1], 1000))
        assert running.first.wait(10)
        waiting = loop.send(greedy_request("waiting", [2], 5))
        assert loop.abort("waiting")
        assert waiting.result().token_ids == ()
        assert waiting.result().finish_reason is FinishReason.ABORTED
        loop.abort("running")


def test_a_request_learns_how_long_it_waited_for_its_first_step(ahead: bool) -> None:
    options = replace(SLOW, max_batch_size=1)
    loop = Loop(LazyEcho(options) if ahead else EchoExecutor(options), None, LoopConfig())
    loop.send(greedy_request("running", [1], 20))
    waiting = loop.send(greedy_request("waiting", [2], 5))
    aborted = loop.send(greedy_request("aborted", [3], 5))
    assert loop.abort("aborted")
    loop.start()
    queue_s = waiting.result().usage.queue_s
    assert queue_s is not None
    assert 20 * options.step_s <= queue_s < waiting.first_at - waiting.made_at
    assert aborted.result().usage.queue_s is None
    loop.stop()


def test_a_storm_of_aborts_loses_nobody(open_loop: OpenLoop) -> None:
    rng = random.Random(3)
    with open_loop(replace(SMALL, step_s=0.0002), LoopConfig(max_queue=10_000)) as loop:
        inboxes = {}
        for number in range(600):
            n = rng.choice((1, 1, 2, 3))
            request = sampled_request(f"r{number}", [1] * rng.randint(1, 20), 20, seed=number, n=n)
            inboxes[request.request_id] = loop.send(request)
            if rng.random() < 0.7:
                loop.abort(rng.choice(list(inboxes)))
        for request_id in inboxes:
            loop.abort(request_id)
        for inbox in inboxes.values():
            inbox.result()
        assert loop.drain(10)
        stats = loop.stats()
    assert stats.requests_admitted == stats.requests_finished == 600
    assert stats.requests_failed == 0


def test_a_deadline_ends_running_and_waiting_requests(open_loop: OpenLoop) -> None:
    with open_loop(replace(SLOW, max_batch_size=1)) as loop:
        soon = time.monotonic() + 1.0
        running = loop.send(greedy_request("running", [1], 1000, deadline=soon))
        waiting = loop.send(greedy_request("waiting", [2], 1000, deadline=soon))
        unhurried = loop.send(greedy_request("unhurried", [3], 3, deadline=soon + 100))
        assert isinstance(running.wait().error, DeadlineError)
        assert isinstance(waiting.wait().error, DeadlineError)
        assert running.outputs
        assert len(unhurried.result().token_ids) == 3
        with pytest.raises(DeadlineError):
            loop.send(greedy_request("late", [1], 3, deadline=time.monotonic() - 1))


def test_ten_thousand_requests_fill_the_queue_and_none_is_lost(open_loop: OpenLoop) -> None:
    with open_loop(ROOMY, LoopConfig(max_queue=1000)) as loop:
        inboxes, refused = [], 0
        for number in range(10_000):
            try:
                inboxes.append(loop.send(greedy_request(f"r{number}", [number % 512], 2)))
            except QueueFullError:
                refused += 1
        assert len(inboxes) >= 1000
        assert refused > 0
        for inbox in inboxes:
            assert len(inbox.result().token_ids) == 2
        assert loop.drain(10)
        assert loop.stats().requests_finished == len(inboxes)
        assert loop.stats().waiting == 0


def test_an_id_is_free_again_when_its_request_has_ended(open_loop: OpenLoop) -> None:
    with open_loop(SLOW) as loop:
        first = loop.send(greedy_request("same", [1], 50))
        with pytest.raises(InvalidRequestError, match="live request"):
            loop.send(greedy_request("same", [1], 5))
        loop.abort("same")
        first.result()
        assert len(loop.send(greedy_request("same", [1], 5)).result().token_ids) == 5


def test_a_sink_may_submit_and_abort(open_loop: OpenLoop) -> None:
    with open_loop(ROOMY) as loop:
        second = Inbox()

        def first(delivery: Delivery) -> None:
            assert not isinstance(delivery, TrtcError)
            if delivery[-1].usage is not None:
                loop.submit(greedy_request("r", [2], 3), second)  # its own id, free by now

        loop.submit(greedy_request("r", [1], 2), first)
        assert len(second.result().token_ids) == 3


@pytest.mark.parametrize("at", ["first", "last"])
def test_a_sink_that_raises_ends_only_its_own_request(open_loop: OpenLoop, at: str) -> None:
    calls = []

    def broken(delivery: Delivery) -> None:
        calls.append(delivery)
        assert not isinstance(delivery, TrtcError)
        if at == "first" or delivery[-1].usage is not None:
            raise RuntimeError("the caller's fault")

    with open_loop(ROOMY) as loop:
        loop.submit(greedy_request("broken", [1], 10), broken)
        good = loop.send(greedy_request("good", [2], 30))
        assert len(good.result().token_ids) == 30
        assert loop.healthy()
        assert loop.drain(5)
        assert loop.stats().pages_used == 0
    assert len(calls) == (1 if at == "first" else 10)


def test_a_failing_executor_ends_all_requests_and_the_loop(open_loop: OpenLoop) -> None:
    with open_loop(replace(SLOW, fail_at_step=4)) as loop:
        inboxes = [loop.send(greedy_request(f"r{i}", [i], 100)) for i in range(80)]
        for inbox in inboxes:
            assert isinstance(inbox.wait().error, UnavailableError)
            assert "asked to fail" in str(inbox.error)
        assert not loop.healthy()
        with pytest.raises(UnavailableError, match="asked to fail"):
            loop.send(greedy_request("late", [1], 4))
        assert loop.drain(1)
        assert loop.stats().requests_failed == 80


class BuggyExecutor(EchoExecutor):
    def logits(self, batch: StepBatch) -> Float32s:
        raise KeyError("a bug")


class LazyBuggyExecutor(BuggyExecutor, LazyEcho):
    pass


@pytest.mark.parametrize("executor", [BuggyExecutor, LazyBuggyExecutor])
def test_a_bug_in_the_executor_is_a_failure_too(executor: type[EchoExecutor]) -> None:
    with running_loop(executor=executor()) as loop:
        assert isinstance(loop.send(greedy_request("r", [1], 4)).wait().error, UnavailableError)
        assert not loop.healthy()


class NanExecutor(EchoExecutor):
    """Gives NaN for contexts that begin with token 13."""

    def logits(self, batch: StepBatch) -> Float32s:
        logits = super().logits(batch)
        sequences = batch.query_start.searchsorted(batch.logit_rows, side="right") - 1
        first = self._tokens[batch.page_table[sequences, 0] * self.options.page_size]
        logits[first == 13, 5] = float("nan")
        return logits


class LazyNanExecutor(NanExecutor, LazyEcho):
    pass


@pytest.mark.parametrize("executor", [NanExecutor, LazyNanExecutor])
def test_a_sequence_without_finite_logits_fails_alone(executor: type[EchoExecutor]) -> None:
    with running_loop(executor=executor(ROOMY)) as loop:
        sick = loop.send(sampled_request("sick", [13, 2], 10, n=2))
        well = loop.send(greedy_request("well", [14, 2], 10))
        assert isinstance(sick.wait().error, InvariantError)
        assert len(well.result().token_ids) == 10


def test_draining_refuses_new_requests_and_finishes_the_old(open_loop: OpenLoop) -> None:
    with open_loop(SLOW) as loop:
        inbox = loop.send(greedy_request("r", [1], 20))
        assert not loop.drain(0.01)
        with pytest.raises(UnavailableError, match="draining"):
            loop.send(greedy_request("late", [1], 2))
        assert loop.healthy()
        assert loop.drain(10)
        assert len(inbox.outputs) == 20


def test_stopping_ends_what_runs_and_what_waits(open_loop: OpenLoop) -> None:
    with open_loop(replace(SLOW, max_batch_size=2)) as loop:
        inboxes = [loop.send(greedy_request(f"r{i}", [i], 1000)) for i in range(6)]
        assert inboxes[0].first.wait(10)
        loop.stop()
        for inbox in inboxes:
            assert isinstance(inbox.wait().error, UnavailableError)
        loop.stop()
        assert not loop.healthy()
        with pytest.raises(UnavailableError):
            loop.send(greedy_request("late", [1], 2))


def test_requests_that_cannot_be_met_are_refused_at_the_door(open_loop: OpenLoop) -> None:
    with open_loop(SMALL) as loop:
        assert loop.bounds.max_context == 48
        for request in (
            greedy_request("long", [1] * 48, 1),
            greedy_request("many", [1], 48),
            sampled_request("wide", [1], 4, n=6),
            greedy_request("word", [64], 4),
        ):
            with pytest.raises(InvalidRequestError):
                loop.send(request)
    with open_loop(replace(SMALL, num_pages=4)) as loop:
        assert loop.bounds.max_context == 16


def test_an_idle_loop_sleeps_and_looks_after_its_pool(
    open_loop: OpenLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trtc.runtime.engine.loop._IDLE_CHECK_AFTER_S", 0.05)
    with open_loop(ROOMY) as loop:
        loop.send(greedy_request("a", [1], 4)).result()
        checked = threading.Event()
        checks = loop._state.integrity_checks

        def watched() -> Iterator[None]:
            yield from checks()
            checked.set()

        monkeypatch.setattr(loop._state, "integrity_checks", watched)
        loop.send(greedy_request("b", [1], 4)).result()
        assert checked.wait(10)
        before = time.process_time()
        time.sleep(0.3)
        assert time.process_time() - before < 0.1
        loop.send(greedy_request("c", [1], 4)).result()


def test_a_request_does_not_wait_for_the_check_of_an_idle_pool(
    open_loop: OpenLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trtc.runtime.engine.loop._IDLE_CHECK_AFTER_S", 0.02)
    with open_loop(ROOMY) as loop:
        begun = threading.Event()

        def endless() -> Iterator[None]:
            begun.set()
            while True:
                yield

        with monkeypatch.context() as patch:
            patch.setattr(loop._state, "integrity_checks", endless)
            assert begun.wait(10)
            loop.send(greedy_request("a", [1], 4)).result()


class FailingWhenIdle(EchoExecutor):
    def check(self) -> None:
        if self.num_steps:
            raise EnvironmentFault("the device is gone")


def test_a_device_that_fails_while_nothing_runs_stops_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trtc.runtime.engine.loop._IDLE_CHECK_AFTER_S", 0.02)
    with running_loop(executor=FailingWhenIdle(ROOMY)) as loop:
        time.sleep(0.1)
        assert loop.healthy()
        loop.send(greedy_request("a", [1], 4)).result()
        deadline = time.monotonic() + 10
        while loop.healthy() and time.monotonic() < deadline:
            time.sleep(0.01)
        with pytest.raises(UnavailableError, match="the device is gone"):
            loop.send(greedy_request("late", [1], 4))


def test_a_leak_found_when_idle_stops_the_engine(
    open_loop: OpenLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trtc.runtime.engine.loop._IDLE_CHECK_AFTER_S", 0.02)
    with open_loop(ROOMY) as loop:
        loop.send(greedy_request("a", [1], 4)).result()
        loop._state.cache.pool.allocate(1)
        loop.send(greedy_request("b", [1], 4)).result()
        deadline = time.monotonic() + 10
        while loop.healthy() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not loop.healthy()


def test_a_step_delivers_once_to_each_request(open_loop: OpenLoop) -> None:
    with open_loop(ROOMY) as loop:
        inbox = loop.send(sampled_request("r", [1, 2], 10, n=4))
        result = inbox.result()
    assert inbox.deliveries == 10
    assert [len(one.token_ids) for one in result.completions] == [10] * 4
    finals = [output for output in inbox.outputs if output.finish_reason is not None]
    assert len(finals) == 4
    assert isinstance(inbox.outputs[-1], Output)
    assert inbox.outputs[-1].usage is not None


def test_many_threads_submit_at_once(open_loop: OpenLoop) -> None:
    with open_loop(ROOMY) as loop:
        echo = EchoExecutor(ROOMY)
        failures: list[str] = []

        def client(name: int) -> None:
            for number in range(10):
                request = greedy_request(f"{name}-{number}", [name, number], 5)
                if loop.send(request).result().token_ids != echo.greedy(request.prompt_ids, 5):
                    failures.append(request.request_id)

        threads = [threading.Thread(target=client, args=(name,)) for name in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert failures == []
