"""The scheduler with its pool and cache: no leak, no livelock, and no say in the tokens."""

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)
from msgspec.structs import replace as with_fields

from tests.support.drafts import Guesser
from tests.support.driver import Driver, greedy_outputs, solo_outputs
from tests.support.kv_reader import KvReader
from tests.support.masks import SomeTokens
from tests.support.requests import greedy_request, sampled_request
from trtc.runtime.executors.base import DraftRows
from trtc.runtime.executors.echo import EchoExecutor, EchoOptions
from trtc.runtime.requests.principal import LOCAL, connection
from trtc.runtime.requests.request import FinishReason, GenerationRequest
from trtc.runtime.scheduling.scheduler import StepLimits, plan
from trtc.runtime.scheduling.sequence import Sequence, Status, rank_of
from trtc.runtime.scheduling.step_plan import StepPlan

TINY = EchoOptions(
    vocab_size=64, num_pages=9, page_size=4, max_batch_size=5, max_seq_len=32, max_num_tokens=7
)
SPACIOUS = replace(TINY, num_pages=200, max_batch_size=16, max_num_tokens=64)


WINDOWS: tuple[tuple[int | None, ...], ...] = (
    (None,),
    (None,),
    (None, 6),
    (3, None, 3),
    (9,),
    (1,),
    (None, 5, 11),
    (None, 0),
    (0,),
)
"""Cache layouts: the window of each group; 0: a state."""


def crowded(windows: tuple[int | None, ...], num_pages: int) -> int:
    """At least so many pages that the longest sequence fits."""
    kv = EchoExecutor(replace(TINY, windows=windows)).kv
    return max(num_pages, kv.pages_of_sequence(TINY.max_seq_len))


CLIENTS = (LOCAL, connection("a:1", "a"), connection("a:2", "a"), connection("b:1", "b"))


def draw_request(number: int, rng: random.Random) -> GenerationRequest:
    """Prompts from few tokens, so that many begin alike; some fill whole pages."""
    length = rng.choice([1, 3, 4, 5, 8, 8, 9, 12, 15, 16])
    prompt = [rng.choice((1, 1, 1, 2)) for _ in range(length)]
    max_tokens = rng.randint(1, 32 - length)
    common = {
        "priority": rng.choice((0, 0, 0, 3, -3)),
        "principal": rng.choice(CLIENTS),
        "cache_salt": rng.choice(("", "common", "common", "common")),
        "stop_token_ids": rng.choice(((), (), tuple(range(0, 64, 8)))),
        "prompt_logprobs": rng.choice((None, None, 1)),
        "masks": rng.choice((None, None, None, SomeTokens(TINY.vocab_size, number))),
    }
    if rng.random() < 0.6:
        return greedy_request(f"r{number}", prompt, max_tokens, **common)
    request = sampled_request(
        f"r{number}", prompt, max_tokens, seed=number, n=rng.choice((1, 2, 3)), **common
    )
    if rng.random() < 0.7:
        return request
    return with_fields(request, sampling=with_fields(request.sampling, presence_penalty=0.7))


def check_finished(driver: Driver, request: GenerationRequest, options: EchoOptions) -> None:
    assert driver.outputs(request.request_id) == solo_outputs(request, options)


class SchedulerMachine(RuleBasedStateMachine):
    """Arrivals, steps, cancellations, preemptions and evictions in any order."""

    live = Bundle("live")

    @initialize(
        num_pages=st.integers(8, 24),
        lanes=st.integers(3, 8),
        budget=st.integers(1, 24),
        prefix_cache=st.booleans(),
        ahead=st.booleans(),
        rope_switch=st.none() | st.integers(1, 16),
        windows=st.sampled_from(WINDOWS),
        mask_lateness=st.sampled_from((0.0, 0.3)),
        host_pages=st.sampled_from((0, 0, 1, 5, 40)),
        accepting=st.sampled_from(("no drafts", "all that are right", "a random number")),
        counts_pending=st.booleans(),
        draft_rows=st.builds(DraftRows, most=st.integers(2, 16), as_sequences=st.booleans()),
        max_kv_events=st.sampled_from((2, 1000)),
        max_kv_batches=st.sampled_from((2, 1000)),
    )
    def open(
        self,
        num_pages: int,
        lanes: int,
        budget: int,
        prefix_cache: bool,
        ahead: bool,
        rope_switch: int | None,
        windows: tuple[int | None, ...],
        mask_lateness: float,
        host_pages: int,
        accepting: str,
        counts_pending: bool,
        draft_rows: DraftRows,
        max_kv_events: int,
        max_kv_batches: int,
    ) -> None:
        self.options = replace(
            TINY,
            num_pages=crowded(windows, num_pages),
            windows=windows,
            max_batch_size=lanes,
            max_num_tokens=budget,
            rope_switch=rope_switch,
            accepts_at_random=accepting == "a random number",
            counts_pending=ahead and counts_pending,
            draft_rows=draft_rows,
        )
        self.driver = Driver(
            self.options,
            prefix_cache=prefix_cache,
            ahead=ahead,
            mask_lateness=mask_lateness,
            host_pages=host_pages,
            drafter=None if accepting == "no drafts" else Guesser(self.options),
            max_kv_events=max_kv_events,
            max_kv_batches=max_kv_batches,
        )
        self.router = KvReader(self.driver.log)
        self.requests: dict[str, GenerationRequest] = {}
        self.numbers = itertools.count()

    @rule(target=live, seed=st.integers(0, 10_000))
    def arrive(self, seed: int) -> str:
        request = draw_request(next(self.numbers), random.Random(seed))
        self.requests[request.request_id] = request
        self.driver.submit(request)
        return request.request_id

    @precondition(lambda self: self.driver.pipeline.has_room)
    @rule()
    def launch(self) -> None:
        first = next(iter(self.driver.state.running), None)
        goes_on = (
            first is not None
            and first.num_remaining == 1
            and not (first.is_held or self.driver.state.sits_out(first))
        )
        if self.driver.launch():
            # The first in rank never waits for anyone.
            assert not goes_on or self.driver.planned.chunks[0].sequence is first

    @precondition(lambda self: self.driver.pipeline.num_in_flight)
    @rule()
    def complete(self) -> None:
        self.driver.complete()

    @rule(number=st.integers(1, 6))
    def step(self, number: int) -> None:
        for _ in range(number):
            if self.driver.is_busy:
                if self.driver.pipeline.has_room:
                    self.launch()
                if self.driver.pipeline.has_room:
                    self.launch()
                self.complete()

    @rule(request_id=consumes(live))
    def cancel(self, request_id: str) -> None:
        self.driver.abort(request_id)
        del self.requests[request_id]

    @precondition(lambda self: self.driver.state.running and not self.driver.pipeline.num_in_flight)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        victim = data.draw(st.sampled_from(self.driver.state.running))
        step_plan = StepPlan(preempted=(victim,))
        self.driver.state.apply(step_plan)
        self.driver.state.commit(step_plan, [])

    @rule()
    def evict(self) -> None:
        self.driver.state.cache.clear()

    @rule()
    def tell(self) -> None:
        """Make a batch, which a slow router does not read yet."""
        self.driver.log.collect()

    @rule()
    def route(self) -> None:
        self.driver.log.collect()
        self.router.read()
        self.router.check(self.driver.state.cache, self.driver.tier)

    @rule(target=live)
    def nobody(self) -> object:
        """Keeps the bundle's type when everyone was cancelled."""
        return multiple()

    @invariant()
    def nothing_leaks(self) -> None:
        if hasattr(self, "driver"):
            self.driver.state.check_integrity()
            self.driver.book.check(self.driver.state.cache)

    @invariant()
    def planning_changes_nothing(self) -> None:
        if hasattr(self, "driver"):
            first = plan(self.driver.state, self.driver.limits)
            assert plan(self.driver.state, self.driver.limits) == first

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        self.driver.run()
        self.driver.state.check_integrity()
        for request in self.requests.values():
            check_finished(self.driver, request, self.options)
        self.driver.state.cache.clear()
        assert self.driver.state.cache.pool.num_free == self.options.num_pages


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=40, stateful_step_count=60, derandomize=True, deadline=None
)


@pytest.mark.parametrize(
    ("seed", "windows", "ahead"),
    [
        (0, (None,), False),
        (0, (None,), True),
        (1, (None,), True),
        (2, (None, 6, 6), False),
        (3, (None, 0), False),
        (3, (None, 0), True),
    ],
)
def test_pages_are_conserved_over_a_long_random_walk(
    seed: int, windows: tuple[int | None, ...], ahead: bool
) -> None:
    """A crowded pool, integrity checked after each step. In four walks, 13,400 steps, the executor
    accepts a random number of drafts, and there is a tier in the host's memory. The machine above
    has every layout with and without running ahead."""
    drafts = seed > 0
    rng = random.Random(seed)
    options = replace(
        TINY,
        num_pages=crowded(windows, rng.randint(8, 14)),
        windows=windows,
        max_num_tokens=rng.choice((3, 8, 40)),
        accepts_at_random=drafts,
        counts_pending=ahead and seed > 0,
        draft_rows=DraftRows(most=16, as_sequences=seed == 2 or (seed == 3 and ahead)),
    )
    driver = Driver(
        options,
        ahead=ahead,
        mask_lateness=0.1,
        host_pages=20 * seed,
        drafter=Guesser(options, seed) if drafts else None,
    )
    requests: dict[str, GenerationRequest] = {}
    numbers = iter(range(10**6))
    for _ in range(3_350 if drafts else 1_500):
        if len(driver.state.waiting) < 4:
            request = draw_request(next(numbers), rng)
            requests[request.request_id] = request
            driver.submit(request)
        driver.step()
        if rng.random() < 0.03:
            driver.abort(requests.pop(rng.choice(list(requests))).request_id)
        driver.state.check_integrity()
        for request_id in [
            one
            for one in requests
            if all(s.status is Status.FINISHED for s in driver.sequences[one])
        ]:
            request = requests.pop(request_id)
            if int(request_id[1:]) % 8 == 0:  # the machine above checks them all
                check_finished(driver, request, options)
            del driver.sequences[request_id]
    assert driver.state.counters.preemptions > 25
    assert driver.state.counters.prefix_hit_tokens > (500 if len(windows) == 1 else 100)
    assert (driver.num_pending_tokens > 500) == ahead
    assert (driver.num_counted_tokens > 50) == options.counts_pending
    assert driver.restorer is None or driver.restorer.num_tokens > 50
    assert driver.restorer is None or driver.num_unfinished > 5, driver.num_unfinished
    assert driver.masks.num_late > 50
    counters = driver.state.counters
    assert (counters.drafted_tokens > counters.accepted_tokens > 250) == drafts


def test_tokens_do_not_depend_on_the_chunking() -> None:
    requests = [greedy_request(f"r{i}", [i] * (5 + 3 * i), 10) for i in range(6)]
    for budget in (1, 2, 5, 64):
        options = replace(SPACIOUS, max_num_tokens=budget)
        driver = Driver(options)
        for request in requests:
            driver.submit(request)
        driver.run()
        for request in requests:
            expected = greedy_outputs(request.prompt_ids, request.max_tokens, options)
            assert driver.outputs(request.request_id) == [expected]


def test_decodes_come_before_prefills() -> None:
    driver = Driver(replace(SPACIOUS, max_num_tokens=6))
    for name in "ab":
        driver.submit(greedy_request(name, [1, 2], 8))
    driver.step()
    driver.submit(greedy_request("long", [3] * 20, 2))
    step_plan = driver.step()
    assert [(c.sequence.request.request_id, c.num_tokens) for c in step_plan.chunks] == [
        ("a", 1),
        ("b", 1),
        ("long", 4),
    ]


def test_an_identical_prompt_recomputes_its_last_token_only() -> None:
    driver = Driver(SPACIOUS)
    prompt = [5, 6, 7, 8] * 3  # exactly three pages
    driver.submit(greedy_request("first", prompt, 3))
    driver.run()
    second = driver.submit(greedy_request("second", prompt, 3))
    step_plan = driver.step()
    assert step_plan.chunks[0].num_tokens == 1
    assert second.cached_prompt_tokens == 11
    driver.state.check_integrity()
    driver.run()
    assert driver.outputs("first") == driver.outputs("second")


def test_sequences_of_one_request_share_the_pages_of_its_prompt() -> None:
    driver = Driver(SPACIOUS, prefix_cache=False)
    request = sampled_request("r", [1, 2, 3, 4, 5, 6], 10, n=4)
    driver.submit(request)
    driver.step()  # prefill and fork: two pages, shared by four
    pages = {tuple(sequence.pages[0]) for sequence in driver.sequences["r"]}
    assert len(driver.sequences["r"]) == 4
    assert len(pages) == 1
    driver.step()  # each writes to the half-full page: three copies and the original
    seconds = {sequence.pages[0][1] for sequence in driver.sequences["r"]}
    firsts = {sequence.pages[0][0] for sequence in driver.sequences["r"]}
    assert (len(firsts), len(seconds)) == (1, 4)
    driver.run()
    outputs = driver.outputs("r")
    assert len({tuple(output) for output in outputs}) == 4
    assert outputs == solo_outputs(request, SPACIOUS)


def test_two_computations_of_one_page_end_in_one_page() -> None:
    driver = Driver(SPACIOUS)
    driver.submit(greedy_request("a", [9] * 9, 6))
    driver.submit(greedy_request("b", [9] * 9, 6))
    driver.step()
    a, b = driver.sequences["a"][0], driver.sequences["b"][0]
    assert a.pages[0][:2] == b.pages[0][:2]
    assert a.pages[0][2] != b.pages[0][2]
    driver.state.check_integrity()


def test_preemption_takes_the_sequence_that_loses_least() -> None:
    # 8 pages of 4. In the fifth step 'big' needs a page and there is none: below it 'small' has
    # computed 4 tokens and 'middle' 8.
    options = replace(TINY, num_pages=8, max_num_tokens=64, max_batch_size=8)
    driver = Driver(options, prefix_cache=False)
    driver.submit(greedy_request("old", [1] * 3, 20))
    for name, length in (("big", 9), ("small", 1), ("middle", 5)):
        driver.submit(greedy_request(name, [len(name)] * length, 16))
    preempted: list[str] = []
    while not preempted:
        preempted = [one.request.request_id for one in driver.step().preempted]
    assert preempted == ["small"]
    driver.run()
    assert driver.outputs("small") == [greedy_outputs([5], 16, options)]


def test_a_low_priority_request_is_overtaken_for_a_bounded_time_only() -> None:
    driver = Driver(replace(TINY, max_batch_size=1))
    late = driver.submit(greedy_request("patient", [1], 2, priority=-2))
    for number in range(200):
        driver.submit(greedy_request(f"eager{number}", [2], 2, priority=2))
        driver.step()
        if late.status is Status.FINISHED:
            break
    assert late.status is Status.FINISHED
    # Four steps of priority are 40 s: 40 requests of two steps each come before it.
    assert driver.now <= 40 * 2 + 2


def test_rank_prefers_priority_then_arrival() -> None:
    def rank(priority: int, arrival: float) -> tuple[float, int, int]:
        return rank_of(priority, arrival, 0, ageing_s=10.0)

    assert rank(0, 1.0) < rank(0, 2.0)
    assert rank(1, 5.0) < rank(0, 1.0)
    assert rank(0, 1.0) < rank(1, 12.0)


def test_stop_tokens_and_length_end_a_sequence() -> None:
    tokens = greedy_outputs([1, 2, 3], 8, SPACIOUS)
    for stop_at in (0, 3):
        driver = Driver(SPACIOUS)
        sequence = driver.submit(
            greedy_request("r", [1, 2, 3], 8, stop_token_ids=(tokens[stop_at],))
        )
        driver.run()
        assert driver.outputs("r") == [tokens[: tokens.index(tokens[stop_at]) + 1]]
        assert sequence.finish_reason() is FinishReason.STOP
    driver = Driver(SPACIOUS)
    ignoring = driver.submit(
        greedy_request("r", [1, 2, 3], 8, ignore_eos=True), eos=frozenset(tokens)
    )
    driver.run()
    assert len(driver.outputs("r")[0]) == 8
    assert ignoring.finish_reason() is FinishReason.LENGTH


def test_a_sequence_may_fill_the_whole_pool() -> None:
    driver = Driver(replace(TINY, num_pages=8, max_seq_len=32))
    request = greedy_request("r", [1] * 16, 16)
    driver.submit(request)
    driver.submit(with_fields(request, request_id="s"))
    driver.run()
    assert driver.outputs("r") == driver.outputs("s")


def test_rows_with_invalid_logits_leave_nothing_in_the_cache() -> None:
    driver = Driver(SPACIOUS)
    driver.submit(greedy_request("r", [1] * 8, 4))
    step_plan = plan(driver.state, driver.limits)
    driver.state.apply(step_plan)
    driver.state.take_changes()
    (drawn,) = driver.state.commit(step_plan, [0], invalid_rows=(0,))
    driver.state.finish([drawn.sequence])
    driver.state.check_integrity()
    assert driver.state.cache.num_idle == 0


def test_planning_two_hundred_sequences_reads_each_page_once_at_most() -> None:
    """Not a timed test: it counts that planning a decode step looks at no token."""
    options = replace(SPACIOUS, num_pages=2048, max_batch_size=256, max_num_tokens=4096)
    driver = Driver(options)
    for number in range(256):
        driver.submit(greedy_request(f"r{number}", [number % 64, 1, 2], 20))
    driver.step()

    class Watched(list[int]):
        reads = 0

        def __getitem__(self, index: object) -> int:  # type: ignore[override]
            Watched.reads += 1
            return super().__getitem__(index)  # type: ignore[call-overload,no-any-return]

    sequences: list[Sequence] = driver.state.running
    for sequence in sequences:
        sequence.token_ids = Watched(sequence.token_ids)
    assert len(plan(driver.state, StepLimits(4096)).chunks) == 256
    assert Watched.reads == 0


def test_siblings_need_one_page_less_than_they_are_to_part() -> None:
    # Three pages: a full one and half of another, shared by two. One copy is enough.
    options = replace(TINY, num_pages=3, max_seq_len=12)
    driver = Driver(options, prefix_cache=False)
    driver.submit(sampled_request("r", [1, 2, 3, 4, 5, 6], 3, n=2))
    driver.step()
    step_plan = driver.step()
    assert step_plan.preempted == ()
    assert len(step_plan.chunks) == 2


def test_prompts_admitted_together_count_their_common_pages_once() -> None:
    # Five pages: two idle ones match both prompts, which want one more each; one is kept back.
    options = replace(TINY, num_pages=5, max_seq_len=20, max_num_tokens=64)
    driver = Driver(options)
    driver.submit(greedy_request("before", [1] * 8, 1))
    driver.run()
    driver.submit(greedy_request("a", [1] * 9, 2))
    driver.submit(greedy_request("b", [1] * 8 + [2], 2))
    step_plan = driver.step()
    assert [len(admission.matched) for admission in step_plan.admissions] == [2, 2]
    driver.run()


def test_prompts_are_cut_beside_decodes_alone() -> None:
    driver = Driver(replace(SPACIOUS, max_num_tokens=24))
    limits = StepLimits(24, max_tokens_beside_decodes=5)
    driver.submit(greedy_request("long", [3] * 20, 4))
    alone = plan(driver.state, limits)
    assert [chunk.num_tokens for chunk in alone.chunks] == [20]
    driver.step()
    driver.submit(greedy_request("late", [5] * 20, 4))
    beside = plan(driver.state, limits)
    assert [chunk.num_tokens for chunk in beside.chunks] == [1, 4]
    least = plan(driver.state, StepLimits(24, max_tokens_beside_decodes=1))
    assert [chunk.num_tokens for chunk in least.chunks] == [1, 1]
    free = plan(driver.state, StepLimits(24))
    assert [chunk.num_tokens for chunk in free.chunks] == [1, 20]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("lengths", [(5, 4), (8, 1), (3, 30), (9, 4)])
def test_a_sequence_that_outgrows_its_rotary_factors_is_computed_anew(
    lengths: tuple[int, int], ahead: bool
) -> None:
    """The echo executor reads keys of other factors as tokens that do not exist."""
    options = replace(TINY, num_pages=32, rope_switch=8)
    driver = Driver(options, ahead=ahead)
    num_prompt, num_new = lengths
    prompt = list(range(1, num_prompt + 1))
    for name in ("first", "again"):  # the second finds pages in the prefix cache
        driver.submit(greedy_request(name, prompt, num_new))
        driver.run()
        assert driver.outputs(name) == [greedy_outputs(prompt, num_new, options)]
    crosses = num_prompt <= 8 < num_prompt + num_new - 1
    assert driver.state.counters.preemptions == (2 if crosses else 0)


def test_factors_follow_the_length_of_each_sequence() -> None:
    options = replace(TINY, num_pages=32, rope_switch=8)
    driver = Driver(options)
    short = driver.submit(greedy_request("short", [1, 2, 3], 2))
    long = driver.submit(greedy_request("long", list(range(1, 12)), 2))
    driver.launch()
    assert (short.position_offset, long.position_offset) == (0, 8)


def test_sequences_that_windows_bound_share_a_pool_that_was_too_small() -> None:
    """One group keeps every token, five keep a window: pages follow the tokens that count."""

    def steps(windows: tuple[int | None, ...]) -> float:
        options = replace(
            TINY,
            windows=windows,
            num_pages=6 * 64,
            max_seq_len=256,
            max_batch_size=4,
            max_num_tokens=64,
        )
        driver = Driver(options, prefix_cache=False)
        for number in range(4):
            driver.submit(greedy_request(f"r{number}", [number + 1] * 200, 56))
        driver.run()
        for number in range(4):
            expected = greedy_outputs([number + 1] * 200, 56, options)
            assert driver.outputs(f"r{number}") == [expected]
        return driver.now

    assert 2 * steps((None, 16, 16, 16, 16, 16)) < steps((None,) * 6)


def test_snapshots_between_those_of_every_fourth_page_are_evicted_first() -> None:
    driver = Driver(replace(SPACIOUS, windows=(None, 0), max_seq_len=64))
    prompt = list(range(1, 42))
    one = driver.submit(greedy_request("one", prompt, 2))
    driver.run()
    cache, namespace = driver.state.cache, one.namespace

    def hits() -> list[int]:
        return [len(cache.match(prompt[:length], namespace)) for length in (41, 37, 34, 30, 18, 9)]

    assert hits() == [10, 9, 8, 7, 4, 2]
    used = [page for page in range(200) if cache.is_idle(page)]
    assert len(used) == 20
    held = cache.allocate(cache.pool.num_free + 7)  # pages 1, 2, 3, 5, 6, 7 and 9
    assert hits() == [10, 8, 8, 4, 4, 0]
    cache.release(held)
    cache.check_integrity([])
    # What is found again is not spare while somebody holds it.
    driver.submit(greedy_request("again", prompt, 4))
    driver.run()
    assert driver.outputs("again")[0][:2] == driver.outputs("one")[0]
    driver.state.check_integrity()


def test_a_prefix_is_found_where_a_windows_last_pages_are_left() -> None:
    driver = Driver(replace(SPACIOUS, windows=(None, 6), max_seq_len=64))
    prompt = list(range(1, 41))
    driver.submit(greedy_request("first", prompt, 4))
    driver.run()
    again = driver.submit(greedy_request("again", prompt, 4))
    driver.run()
    assert again.cached_prompt_tokens == 39
    assert driver.outputs("first") == driver.outputs("again")
    # Without a page in the middle of the window the prefix ends before the gap.
    cache = driver.state.cache
    matched = cache.match(prompt, again.namespace)
    assert len(matched) == 10
    gap = matched[9].pages[1]
    assert cache.is_idle(gap)
    while cache.is_idle(gap):
        cache._idle = dict(sorted(cache._idle.items(), key=lambda item: item[0] != gap))
        cache._evict_one()
    cache.check_integrity([])
    assert len(cache.match(prompt, again.namespace)) == 9
    third = driver.submit(greedy_request("third", prompt, 4))
    driver.run()
    assert third.cached_prompt_tokens == 36
    assert driver.outputs("third") == driver.outputs("first")
