"""The order of admission: fair among hosts and clients, priority first, and bounded in time."""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.support.driver import Driver, solo_outputs
from tests.support.requests import greedy_request
from trtc.runtime.executors.echo import EchoOptions
from trtc.runtime.requests.principal import Principal, connection, tenant
from trtc.runtime.requests.tenant_limits import TenantLimits
from trtc.runtime.scheduling.fair_queue import MAX_IDLE_TAGS, FairQueue, _Node
from trtc.runtime.scheduling.scheduler import plan
from trtc.runtime.scheduling.sequence import Sequence, Status, rank_of

GREEDY = connection("a:1", "a")
MODEST = connection("a:2", "a")
FAR = connection("b:1", "b")
AGEING_S, OVERDUE_S = 3.0, 60.0
OPTIONS = EchoOptions(
    vocab_size=64, num_pages=400, page_size=4, max_batch_size=4, max_seq_len=64, max_num_tokens=64
)

_numbers = itertools.count()


def waiting(
    queue: FairQueue,
    principal: Principal,
    *,
    priority: int = 0,
    prompt: int = 1,
    max_tokens: int = 1,
) -> Sequence:
    """A sequence that has come now."""
    number = next(_numbers)
    request = greedy_request(
        str(number), [1] * prompt, max_tokens, principal=principal, priority=priority
    )
    order = rank_of(priority, queue.now, number, AGEING_S)
    sequence = Sequence(request, number=number, order=order, eos_token_ids=frozenset())
    queue.add(sequence)
    return sequence


def owner(sequence: Sequence) -> Principal:
    return sequence.request.principal


def admit_first(queue: FairQueue) -> Sequence:
    first = next(queue.forecast())
    queue.admit(first)
    return first


def serve(queue: FairQueue, number: int) -> list[Principal]:
    """Run so many sequences, one after another on one lane; whose they were."""
    owners = []
    for _ in range(number):
        first = admit_first(queue)
        queue.release(owner(first), 1)
        owners.append(owner(first))
    return owners


def test_a_newcomer_does_not_stand_behind_what_another_has_waiting() -> None:
    queue = FairQueue(OVERDUE_S)
    for _ in range(1000):
        waiting(queue, GREEDY)
    serve(queue, 10)
    waiting(queue, MODEST)
    assert MODEST in serve(queue, 2)


def test_lanes_are_shared_by_those_who_wait() -> None:
    queue = FairQueue(OVERDUE_S)
    for _ in range(100):
        waiting(queue, GREEDY)
    running = [admit_first(queue) for _ in range(8)]
    for _ in range(6):
        waiting(queue, MODEST)
    for _ in range(4):  # each lane that the greedy one gives back goes to the modest one
        queue.release(owner(running.pop(0)), 1)
        running.append(admit_first(queue))
    assert Counter(owner(one) for one in running) == {GREEDY: 4, MODEST: 4}
    queue.check_integrity(8)


def test_one_lane_is_shared_by_tokens() -> None:
    queue = FairQueue(OVERDUE_S)
    for _ in range(300):
        waiting(queue, GREEDY, prompt=299)
        waiting(queue, MODEST, prompt=99)
    served = Counter(serve(queue, 200))
    assert 2.5 < served[MODEST] / served[GREEDY] < 3.5


def test_a_client_that_sends_one_by_one_takes_no_more_than_its_half() -> None:
    queue = FairQueue(OVERDUE_S)
    for _ in range(100):
        waiting(queue, GREEDY)
    served = Counter[Principal]()
    for _ in range(100):
        if not any(owner(one) == MODEST for one in queue):
            waiting(queue, MODEST)
        served.update(serve(queue, 1))
    assert abs(served[MODEST] - served[GREEDY]) <= 2


def test_many_connections_of_one_host_are_one_host() -> None:
    queue = FairQueue(OVERDUE_S)
    for port in range(100):
        waiting(queue, connection(f"a:{port}", "a"))
    for _ in range(20):
        waiting(queue, FAR)
    served = serve(queue, 40)
    assert sum(one.group == "host a" for one in served) in (20, 21)


def test_tenants_do_not_count_as_one_host() -> None:
    queue = FairQueue(OVERDUE_S)
    for name in "xyz":
        for _ in range(10):
            waiting(queue, tenant(name))
    assert max(Counter(serve(queue, 9)).values()) == 3


def weighing(name: str, weight: float) -> Principal:
    return tenant(name, limits=TenantLimits(weight=weight))


@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=4))
@settings(max_examples=30)
def test_tenants_are_served_in_proportion_to_their_weights(weights: list[float]) -> None:
    queue = FairQueue(OVERDUE_S)
    tenants = [weighing(str(number), weight) for number, weight in enumerate(weights)]
    for one in tenants:
        for _ in range(600):
            waiting(queue, one)
    served = Counter(serve(queue, 500))
    for one in tenants:
        assert abs(served[one] - 500 * one.limits.weight / sum(weights)) <= 2 * len(tenants)
    queue.check_integrity(0)


def test_lanes_are_shared_by_weight() -> None:
    queue = FairQueue(OVERDUE_S)
    heavy, light = weighing("heavy", 3), weighing("light", 1)
    for _ in range(20):
        waiting(queue, light)
    for _ in range(20):
        waiting(queue, heavy)
    running = [admit_first(queue) for _ in range(8)]
    assert Counter(owner(one) for one in running) == {heavy: 6, light: 2}
    queue.check_integrity(8)


def test_a_weight_that_changes_counts_from_the_next_request_on() -> None:
    queue = FairQueue(OVERDUE_S)
    for _ in range(300):
        waiting(queue, FAR)
        waiting(queue, weighing("x", 1))
    assert abs(Counter(serve(queue, 100))[tenant("x")] - 50) <= 2
    waiting(queue, weighing("x", 4))
    assert abs(Counter(serve(queue, 100))[tenant("x")] - 80) <= 2
    queue.check_integrity(0)


def test_priority_comes_before_fairness() -> None:
    queue = FairQueue(OVERDUE_S)
    for _ in range(3):
        waiting(queue, MODEST)
        waiting(queue, GREEDY, priority=1)
    assert serve(queue, 3) == [GREEDY] * 3


def test_a_request_waits_for_a_bounded_time_whatever_the_priorities_of_others() -> None:
    queue = FairQueue(OVERDUE_S)
    patient = waiting(queue, MODEST, priority=-10)
    while patient in list(queue):
        queue.tick(queue.now + 1.0)
        for host in "cde":
            waiting(queue, connection(f"{host}:{next(_numbers)}", host), priority=10)
        serve(queue, 1)
        assert queue.now <= OVERDUE_S + 1
    assert queue.now >= OVERDUE_S


def test_newcomers_of_equal_priority_do_not_starve_who_has_had_something() -> None:
    """Each comes from a host of its own, and so with the smallest tag."""
    queue = FairQueue(OVERDUE_S)
    for _ in range(2):
        waiting(queue, MODEST, prompt=60)
    serve(queue, 1)
    last = next(iter(queue))
    while last in list(queue):
        queue.tick(queue.now + 1.0)
        for _ in range(2):
            host = str(next(_numbers))
            waiting(queue, connection(f"{host}:1", host))
        serve(queue, 1)
        assert queue.now <= OVERDUE_S + 1


def test_being_overdue_gives_one_admission_and_not_all() -> None:
    queue = FairQueue(OVERDUE_S)
    for _ in range(100):
        waiting(queue, GREEDY, priority=-1)
    queue.tick(OVERDUE_S)
    for _ in range(10):
        waiting(queue, FAR)
    assert serve(queue, 3) == [GREEDY, FAR, FAR]


def test_clients_that_have_gone_leave_nothing_behind() -> None:
    queue = FairQueue(OVERDUE_S)
    for number in range(3 * MAX_IDLE_TAGS):
        waiting(queue, connection(f"{number}:1", str(number)))
        serve(queue, 1)
        queue.tick(queue.now + 0.001)
    assert not queue._hosts.nodes
    assert not queue._hosts.patient
    assert not queue._patient_clients
    assert len(queue._hosts._idle_tags) <= MAX_IDLE_TAGS


def test_a_forecast_is_what_admissions_do() -> None:
    queue = FairQueue(OVERDUE_S)
    for number in range(60):
        principal = (GREEDY, MODEST, FAR)[number * number % 3]
        waiting(queue, principal, priority=number % 2, prompt=1 + number % 7)
    forecast = list(queue.forecast())
    assert forecast == [admit_first(queue) for _ in range(60)]
    queue.check_integrity(60)


@given(
    arrivals=st.lists(
        st.tuples(st.floats(0, 20), st.integers(-10, 10), st.booleans()), min_size=2, max_size=120
    )
)
@settings(max_examples=200, derandomize=True, deadline=None)
def test_after_a_minute_a_request_is_overtaken_by_none_of_its_own_client(
    arrivals: list[tuple[float, int, bool]],
) -> None:
    """Whatever the client sends, and however slowly it is served."""
    queue = FairQueue(OVERDUE_S)
    came: dict[Sequence, float] = {}

    def serve_first() -> None:
        at = came.pop(admit_first(queue))
        assert at <= min(came.values(), default=at) + OVERDUE_S + 1e-6

    for pause, priority, is_served in arrivals:
        queue.tick(queue.now + pause)
        came[waiting(queue, GREEDY, priority=priority)] = queue.now
        if is_served:
            serve_first()
    while came:
        serve_first()


def test_a_client_that_sends_high_priorities_without_end_starves_none_of_its_own() -> None:
    """Twice as many come as are served: the low one is served when those have been that came
    within a minute of it."""
    queue = FairQueue(OVERDUE_S)
    low = waiting(queue, GREEDY, priority=-10)
    num_served = 0
    while low in list(queue):
        queue.tick(queue.now + 1.0)
        for _ in range(2):
            waiting(queue, GREEDY, priority=10)
        serve(queue, 1)
        num_served += 1
        assert num_served <= 2 * (OVERDUE_S + 1)
    assert num_served >= 2 * (OVERDUE_S - 1)


@pytest.mark.parametrize("num_lanes", [4, 5, 8])
def test_a_plan_looks_at_no_more_of_the_queue_than_it_admits(
    monkeypatch: pytest.MonkeyPatch, num_lanes: int
) -> None:
    """However many wait: 4 run already."""
    driver = Driver(replace(OPTIONS, max_batch_size=num_lanes))
    for number in range(4):
        driver.submit(greedy_request(f"r{number}", [1], 60))
    driver.step()
    for number in range(1000):
        driver.submit(greedy_request(f"w{number}", [2], 60))
    seen: list[Sequence] = []
    forecast = FairQueue.forecast

    def counted(queue: FairQueue) -> Iterator[Sequence]:
        for sequence in forecast(queue):
            seen.append(sequence)
            yield sequence

    monkeypatch.setattr(FairQueue, "forecast", counted)
    step_plan = plan(driver.state, driver.limits)
    assert len(step_plan.admissions) == num_lanes - 4
    assert len(seen) <= num_lanes - 4 + 1


CLIENTS = [
    *(connection(f"{host}:{port}", host) for host in "ab" for port in "12"),
    tenant("CN=t"),
]


class QueueMachine(RuleBasedStateMachine):
    """Five clients of three hosts come, wait, run and leave, while time passes."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = FairQueue(OVERDUE_S)
        self.running: list[Sequence] = []
        self.waits_since: dict[str, float] = {}
        """name of a group -> since when it waits without an admission."""

    @rule(
        principal=st.sampled_from(CLIENTS),
        priority=st.sampled_from([-10, 0, 0, 10]),
        prompt=st.integers(1, 50),
        number=st.integers(1, 5),
    )
    def arrive(self, principal: Principal, priority: int, prompt: int, number: int) -> None:
        for _ in range(number):
            waiting(self.queue, principal, priority=priority, prompt=prompt)
        self.waits_since.setdefault(principal.group, self.queue.now)

    @rule(seconds=st.sampled_from([0.1, 1.0, 30.0]))
    def wait(self, seconds: float) -> None:
        self.queue.tick(self.queue.now + seconds)

    @precondition(lambda self: len(self.queue) > 0)
    @rule(number=st.integers(1, 4))
    def admit(self, number: int) -> None:
        for expected in list(itertools.islice(self.queue.forecast(), number)):
            overdue = {
                group: since
                for group, since in self.waits_since.items()
                if since + OVERDUE_S <= self.queue.now
            }
            any_overdue = any(node.is_overdue for node in self._client_nodes())
            first = admit_first(self.queue)
            assert first is expected
            group = owner(first).group
            if overdue:
                assert self.waits_since[group] == min(overdue.values())
            elif not any_overdue:
                self._check_share(first)
            self.running.append(first)
            self._settle(group, admitted=True)

    def _check_share(self, first: Sequence) -> None:
        """Nobody of the same host and priority who waits held fewer lanes."""
        held = Counter(owner(one).name for one in self.running)
        mine = held[owner(first).name]
        top = self._top_priority([*self._of_group(owner(first).group), first])
        rivals: dict[str, list[Sequence]] = {}
        for one in self._of_group(owner(first).group):
            rivals.setdefault(owner(one).name, []).append(one)
        for name, theirs in rivals.items():
            if self._top_priority(theirs) == top:
                assert mine <= held[name] or name == owner(first).name

    def _client_nodes(self) -> list[_Node]:
        return [
            node
            for host in self.queue._hosts.nodes.values()
            if host.members is not None
            for node in host.members.nodes.values()
        ]

    def _of_group(self, group: str) -> list[Sequence]:
        return [one for one in self.queue if owner(one).group == group]

    @staticmethod
    def _top_priority(sequences: Iterable[Sequence]) -> int:
        return max(one.request.priority for one in sequences)

    def _settle(self, group: str, *, admitted: bool) -> None:
        if not self._of_group(group):
            self.waits_since.pop(group, None)
        elif admitted:
            self.waits_since[group] = self.queue.now

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.running) - 1))
        self.queue.release(owner(self.running.pop(index)), 1)

    @precondition(lambda self: len(self.queue) > 0)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        victim = data.draw(st.sampled_from(sorted(self.queue, key=lambda one: one.number)))
        self.queue.remove(victim)
        self._settle(owner(victim).group, admitted=False)

    @invariant()
    def counts_agree(self) -> None:
        self.queue.check_integrity(len(self.running))
        assert len(self.queue) == len(list(self.queue.forecast()))


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(
    max_examples=60, stateful_step_count=50, derandomize=True, deadline=None
)


def test_beside_a_thousand_waiting_requests_a_client_is_served_at_the_next_free_lane() -> None:
    """The whole scheduler, many times: what counts is who was admitted after it came."""
    driver = Driver(OPTIONS)
    for number in range(1000):
        driver.submit(greedy_request(f"g{number}", [1, number % 60], 6, principal=GREEDY))
    for round_number in range(30):
        name = f"m{round_number}"
        modest = driver.submit(greedy_request(name, [2, round_number], 3, principal=MODEST))
        overtaken = 0
        while modest.status is Status.WAITING:
            step_plan = driver.step()
            owners = [owner(admission.sequence) for admission in step_plan.admissions]
            overtaken += owners.index(MODEST) if MODEST in owners else len(owners)
        assert overtaken <= 1
        while modest.status is not Status.FINISHED:
            driver.step()
    assert len(driver.state.waiting) > 800


def test_long_prompts_of_one_client_do_not_stop_the_short_ones_of_another() -> None:
    """Seven hundred steps of a crowded pool: each client keeps half of the admissions' lanes."""
    options = replace(OPTIONS, num_pages=24, max_num_tokens=16)
    driver = Driver(options)
    numbers = itertools.count()
    lanes: Counter[Principal] = Counter()
    for _ in range(700):
        held = Counter(owner(one) for one in driver.state.waiting)
        for principal, prompt in ((GREEDY, 30), (MODEST, 3)):
            if held[principal] < 3:
                driver.submit(
                    greedy_request(str(next(numbers)), [3] * prompt, 8, principal=principal)
                )
        driver.step()
        driver.state.check_integrity()
        lanes.update(owner(one) for one in driver.state.running)
    assert lanes[MODEST] > 0.35 * lanes.total()


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("newcomer", [MODEST, FAR])
def test_who_holds_all_lanes_loses_one_to_who_holds_none(newcomer: Principal, ahead: bool) -> None:
    """Long sequences of one client kept all others waiting until the first of them had ended."""
    driver = Driver(OPTIONS, ahead=ahead)
    long = [greedy_request(f"g{number}", [1, number], 60, principal=GREEDY) for number in range(6)]
    for request in long:
        driver.submit(request)
    for _ in range(5):
        driver.step()
    short = driver.submit(greedy_request("m", [9], 3, principal=newcomer))
    for _ in range(8):
        driver.step()
        driver.state.check_integrity()
    assert short.status is Status.FINISHED
    assert driver.state.counters.preemptions == 1
    driver.run()
    for request in long:
        assert driver.outputs(request.request_id) == solo_outputs(request, OPTIONS)


def test_who_holds_all_pages_loses_some_to_who_holds_none() -> None:
    options = replace(OPTIONS, num_pages=40)
    driver = Driver(options)
    for number in range(3):
        driver.submit(greedy_request(f"g{number}", [1, number] * 20, 20, principal=GREEDY))
    for _ in range(3):
        driver.step()
    assert len(driver.state.running) == 3 and driver.state.free_lanes
    short = driver.submit(greedy_request("m", [9] * 40, 1, principal=FAR))
    for _ in range(8):
        driver.step()
    assert short.status is Status.FINISHED
    assert driver.state.counters.preemptions == 1


def test_what_is_computed_again_for_others_is_bounded_in_time() -> None:
    driver = Driver(replace(OPTIONS, max_batch_size=16))
    for number in range(16):
        driver.submit(greedy_request(f"g{number}", [1, number], 60, principal=GREEDY))
    driver.step()
    for number in range(10):
        host = connection(f"x{number}:1", f"x{number}")
        driver.submit(greedy_request(f"m{number}", [9], 50, principal=host))
    for _ in range(35):
        driver.step()
        driver.now -= 0.9  # a step takes 0.1 s
    assert 2 <= driver.state.counters.preemptions <= 4


def test_who_holds_one_lane_keeps_it() -> None:
    driver = Driver(OPTIONS)
    for number in range(4):
        host = connection(f"x{number}:1", f"x{number}")
        driver.submit(greedy_request(f"g{number}", [1, number], 40, principal=host))
    driver.step()
    driver.submit(greedy_request("m", [9], 3, principal=FAR))
    driver.run()
    assert driver.state.counters.preemptions == 0
