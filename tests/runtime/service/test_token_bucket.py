"""The arithmetic of rates: against exact fractions, and by what a bucket promises."""

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from trtc.runtime.service.token_bucket import TokenBucket

RATES = st.integers(1, 10**9)
STEPS = st.lists(
    st.tuples(st.floats(0, 1000, allow_subnormal=False), st.integers(1, 10**6)), max_size=60
)
"""(seconds since the last one, amount)."""


class ExactBucket:
    """The definition, in fractions."""

    def __init__(self, per_minute: int) -> None:
        self.capacity = self.level = Fraction(per_minute)
        self.at = Fraction(0)

    def fill(self, now: float) -> None:
        elapsed = Fraction(now) - self.at
        self.level = min(self.capacity, self.level + elapsed * self.capacity / 60)
        self.at = Fraction(now)

    def wait_s(self, amount: int, now: float) -> float:
        self.fill(now)
        missing = min(Fraction(amount), self.capacity) - self.level
        return float(max(Fraction(0), missing * 60 / self.capacity))


@given(RATES, STEPS)
def test_it_is_the_definition(per_minute: int, steps: list[tuple[float, int]]) -> None:
    bucket, exact, now = TokenBucket(per_minute, 0.0), ExactBucket(per_minute), 0.0
    for elapsed, amount in steps:
        now += elapsed
        expected = exact.wait_s(amount, now)
        assert abs(bucket.wait_s(amount, now) - expected) <= 1e-4 * max(1, expected)
        bucket.take(amount, now)
        exact.level -= amount


@given(RATES, STEPS)
def test_what_is_taken_within_a_time_is_bounded(
    per_minute: int, steps: list[tuple[float, int]]
) -> None:
    """By a burst and the rate, where each takes only what is there."""
    bucket, now, taken = TokenBucket(per_minute, 0.0), 0.0, []
    for elapsed, amount in steps:
        now += elapsed
        asked = min(amount, per_minute)
        if bucket.wait_s(asked, now) == 0:
            bucket.take(asked, now)
            taken.append((now, asked))
    for first, (start, _) in enumerate(taken):
        total = 0
        for end, amount in taken[first:]:
            total += amount
            assert total <= per_minute * (1 + (end - start) / 60) * (1 + 1e-9) + 1e-3


@given(RATES, STEPS, st.integers(1, 10**10))
def test_whoever_waits_as_long_as_told_finds_enough_and_not_much_sooner(
    per_minute: int, steps: list[tuple[float, int]], amount: int
) -> None:
    bucket, now = TokenBucket(per_minute, 0.0), 0.0
    for elapsed, used in steps:
        now += elapsed
        bucket.take(used, now)
    wait_s = bucket.wait_s(amount, now)
    if wait_s > 1e-3:
        assert bucket.wait_s(amount, now + wait_s * 0.99) > 0
    assert bucket.wait_s(amount, now + wait_s * (1 + 1e-9) + 1e-9) <= 1e-4


@given(RATES, RATES, STEPS)
def test_another_rate_keeps_what_is_owed_and_gives_nothing_at_once(
    before: int, after: int, steps: list[tuple[float, int]]
) -> None:
    bucket, now = TokenBucket(before, 0.0), 0.0
    for elapsed, used in steps:
        now += elapsed
        bucket.take(used, now)
    missing = bucket.wait_s(1, now) * before / 60
    bucket.change_rate(after, now)
    assert bucket.wait_s(1, now) * after / 60 >= missing * (1 - 1e-9)
    if missing:
        assert abs(bucket.wait_s(1, now) * after / 60 - missing) <= 1e-3 * max(1, missing)


def test_a_clock_that_stands_or_goes_back_gives_nothing() -> None:
    bucket = TokenBucket(60, 100.0)
    bucket.take(60, 100.0)
    assert bucket.wait_s(1, 50.0) == bucket.wait_s(1, 100.0) == 1.0
