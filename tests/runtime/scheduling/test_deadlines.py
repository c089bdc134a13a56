"""Deadlines in order, and nothing kept of requests that have ended."""

import random

from trtc.runtime.scheduling.deadlines import Deadlines


def test_the_overdue_come_in_order_and_once() -> None:
    deadlines = Deadlines()
    for number, deadline in enumerate((5.0, 1.0, 3.0, 9.0)):
        deadlines.add(number, deadline)
    deadlines.discard(2)
    deadlines.discard(77)
    assert list(deadlines.take_overdue(0.5)) == []
    assert list(deadlines.take_overdue(5.0)) == [1, 0]
    assert list(deadlines.take_overdue(5.0)) == []
    assert len(deadlines) == 1


def test_requests_that_end_early_leave_nothing_until_their_deadline() -> None:
    rng = random.Random(0)
    deadlines = Deadlines()
    live: set[int] = set()
    for number in range(20_000):
        deadlines.add(number, 1e6 + rng.random())
        live.add(number)
        if len(live) > 100:
            gone = rng.choice(sorted(live))
            live.remove(gone)
            deadlines.discard(gone)
        assert deadlines.num_entries <= 2 * len(live) + 65
    assert set(deadlines.take_overdue(2e6)) == live
