"""What is kept of the last minutes, by a clock that the test moves."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.clock import Clock
from trtc.protos.sampling import SamplingParams
from trtc.runtime.engine.loop import LoopStats
from trtc.runtime.requests.principal import Principal, connection, tenant
from trtc.runtime.requests.request import FinishReason, GenerationRequest, Output, Usage
from trtc.runtime.service.activity import (
    COLUMNS,
    MAX_CLIENTS,
    MAX_ENDED,
    MAX_SAMPLES,
    OTHERS,
    Activity,
)
from trtc.runtime.service.latencies import percentiles, size_of
from trtc.runtime.service.progress import LEFT
from trtc.runtime.service.timeline import MAX_MARKS, Timeline

ALICE = tenant("alice")


@pytest.fixture
def clock() -> Clock:
    return Clock(100.0)


@pytest.fixture
def activity(clock: Clock) -> Activity:
    return Activity(clock)


def column(activity: Activity, name: str, engine: str = "m") -> list[float | None]:
    at = COLUMNS.index(name)
    return [one.engines[engine][at] for one in activity.snapshot().samples]


def admit(timeline: Timeline, prompt: int = 3) -> None:
    request = GenerationRequest("r", tuple(range(prompt)), SamplingParams(), 8)
    timeline.admit(request)


def token(usage: Usage | None = None) -> Sequence[Output]:
    reason = None if usage is None else FinishReason.LENGTH
    return [Output("r", 0, (7,), "x", finish_reason=reason, usage=usage)]


def run(
    activity: Activity, clock: Clock, principal: Principal = ALICE, gaps: Sequence[float] = (0.1,)
) -> None:
    """A request from its arrival to its end; its first token comes after half a second."""
    with activity.watching(principal, "m") as timeline:
        admit(timeline)
        clock.now += 0.5
        for gap in gaps:
            timeline.deliver(token(), clock.now)
            clock.now += gap
        timeline.deliver(token(Usage(3, 2, len(gaps) + 1, queue_s=0.25)), clock.now)


@given(
    st.lists(st.floats(1e-6, 1e4), min_size=1, max_size=200),
    st.lists(st.floats(0.01, 1), min_size=1, max_size=3),
)
def test_percentiles_are_those_of_the_sorted_durations(
    seconds: list[float], shares: list[float]
) -> None:
    counts: list[dict[int, int]] = [{}, {}]
    for number, one in enumerate(seconds):
        half = counts[number % 2]
        half[size_of(one)] = half.get(size_of(one), 0) + 1
    found = percentiles(counts, sorted(shares))
    exact = np.quantile(seconds, sorted(shares), method="inverted_cdf")
    np.testing.assert_allclose(found, exact, rtol=0.023)


def test_nothing_has_no_percentiles() -> None:
    assert percentiles([{}, {}], (0.5, 0.99)) == (None, None)


def test_counters_become_rates_and_states_stay(activity: Activity, clock: Clock) -> None:
    activity.sample({"m": LoopStats(generated_tokens=50, running=1)})
    clock.now += 2
    activity.sample({"m": LoopStats(generated_tokens=150, running=3, step_seconds=1.5)})
    assert column(activity, "generated_tokens") == [0, 50]
    assert column(activity, "running") == [1, 3]
    assert column(activity, "busy") == [0, 0.75]


def test_an_engine_that_was_opened_anew_has_no_negative_rates(
    activity: Activity, clock: Clock
) -> None:
    for generated in (900, 5):
        clock.now += 1
        activity.sample({"m": LoopStats(generated_tokens=generated)})
    assert column(activity, "generated_tokens") == [0, 0]


def test_an_engine_that_is_gone_leaves_the_samples(activity: Activity) -> None:
    activity.sample({"m": LoopStats()})
    activity.sample({})
    assert [list(one.engines) for one in activity.snapshot().samples] == [["m"], []]


def test_a_timeline_says_when(activity: Activity, clock: Clock) -> None:
    run(activity, clock, gaps=(0.1, 0.2))
    (ended,) = activity.snapshot().ended
    assert (ended.client, ended.model, ended.outcome) == ("tenant alice", "m", "ok")
    assert (ended.prompt_tokens, ended.cached_prompt_tokens, ended.completion_tokens) == (3, 2, 3)
    assert (ended.admitted_s, ended.scheduled_s, ended.first_token_s) == (0, 0.25, 0.5)
    assert (ended.last_token_s, ended.ended_s) == pytest.approx((0.8, 0.8))
    assert ended.marks == pytest.approx((0.5, 0.6, 0.8))
    assert ended.finish_reasons == ("length",)


def test_a_token_that_was_computed_before_its_admission_was_noted(
    activity: Activity, clock: Clock
) -> None:
    with activity.watching(ALICE, "m") as timeline:
        clock.now += 0.5
        admit(timeline)
        timeline.deliver(token(), clock.now - 0.125)
        timeline.deliver(token(Usage(3, 2, 2, queue_s=0.25)), clock.now)
    (ended,) = activity.snapshot().ended
    assert (ended.admitted_s, ended.scheduled_s, ended.first_token_s) == (0.375, 0.375, 0.375)
    assert ended.last_token_s == 0.5


def test_latencies_are_those_of_the_last_ten_seconds(activity: Activity, clock: Clock) -> None:
    run(activity, clock, gaps=(0.1,))
    for _ in range(11):
        activity.sample({"m": LoopStats()})
    assert column(activity, "first_token_p50") == [pytest.approx(0.5, rel=0.023)] * 10 + [None]
    assert column(activity, "between_tokens_p99")[0] == pytest.approx(0.1, rel=0.023)
    assert column(activity, "queue_p90")[0] == pytest.approx(0.25, rel=0.023)


def test_outcomes_are_counted(activity: Activity, clock: Clock) -> None:
    run(activity, clock)
    with activity.watching(ALICE, "m") as timeline:
        timeline.refuse()
    with activity.watching(ALICE, "m") as timeline:
        admit(timeline)
        timeline.fail("QueueFullError")
    with activity.watching(ALICE, "m") as timeline:
        admit(timeline)
        timeline.fail(LEFT)
    clock.now = 101.0
    activity.sample({"m": LoopStats()})
    outcomes = [column(activity, name) for name in ("finished", "left", "failed", "refused")]
    assert outcomes == [[1]] * 4
    (client,) = activity.snapshot().clients
    assert (client.requests, client.left, client.failed, client.refused) == (4, 1, 1, 1)
    assert client.running == 0
    assert (client.prompt_tokens, client.completion_tokens) == (9, 2)
    assert [one.outcome for one in activity.snapshot().ended] == ["ok", "QueueFullError", "left"]


def test_tokens_of_running_requests_count_for_their_clients(
    activity: Activity, clock: Clock
) -> None:
    with activity.watching(ALICE, "m") as timeline:
        admit(timeline)
        for _ in range(4):
            timeline.deliver(token(), clock.now)
        clock.now += 2
        activity.sample({"m": LoopStats()})
        (running,) = activity.snapshot().running
        assert (running.outcome, running.completion_tokens) == ("", 4)
    clock.now += 1
    activity.sample({"m": LoopStats()})
    assert [one.clients for one in activity.snapshot().samples] == [{"tenant alice": 2}, {}]


def test_an_excerpt_begins_where_the_last_one_ended(activity: Activity, clock: Clock) -> None:
    for _ in range(5):
        activity.sample({"m": LoopStats()})
    run(activity, clock)
    assert len(activity.snapshot(3).samples) == 2
    assert len(activity.snapshot(5).samples) == 0
    assert len(activity.snapshot(5).ended) == 1
    activity.sample({"m": LoopStats()})
    assert len(activity.snapshot(6).ended) == 0
    assert len(activity.snapshot(7000).samples) == 6, "of a server before this one"


def test_what_is_kept_is_bounded(activity: Activity, clock: Clock) -> None:
    for number in range(MAX_ENDED + 50):
        run(activity, clock, tenant(f"t{number}"), gaps=(0.01,) * 2)
        run(activity, clock, connection(f"c{number}", "h"), gaps=())
    for _ in range(MAX_SAMPLES + 5):
        activity.sample({"m": LoopStats()})
    shown = activity.snapshot()
    assert (len(shown.samples), len(shown.ended)) == (MAX_SAMPLES, MAX_ENDED)
    assert len(shown.clients) == MAX_CLIENTS
    by_name = {one.name: one for one in shown.clients}
    assert by_name["anonymous"].requests == MAX_ENDED + 50
    assert by_name[OTHERS].requests == MAX_ENDED + 50 - (MAX_CLIENTS - 2)


def test_marks_are_thinned_evenly(activity: Activity, clock: Clock) -> None:
    random.seed(1)
    with activity.watching(ALICE, "m") as timeline:
        admit(timeline)
        times = []
        for _ in range(1000):
            clock.now += random.uniform(0.01, 0.02)
            times.append(round(clock.now - timeline.arrived_at, 6))
            timeline.deliver(token(), clock.now)
        marks = timeline.times().marks
    assert MAX_MARKS // 2 <= len(marks) <= MAX_MARKS
    assert marks == tuple(times[:: 1000 // len(marks) + 1][: len(marks)])
