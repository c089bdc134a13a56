"""A rate with bursts: a bucket that fills evenly, and that what is used is taken from.

    level(t) = min(capacity, level + rate * elapsed), capacity: what fills it in a minute

Whoever knows what an action costs asks before it and pays for all of it. What costs nobody knows
beforehand, such as the tokens of a completion, is paid as it comes: the level may fall below zero,
and the next one waits for longer. So in T seconds at most capacity + rate * T is taken, and what
the last action cost beyond what was known.
"""

MINUTE_S = 60.0
_ROUNDING = 1e-6
"""Of a level that many sums have made: whoever has waited for the returned time finds enough."""


class TokenBucket:
    """For one thread. Times are seconds of any clock that does not go back."""

    def __init__(self, per_minute: int, now: float) -> None:
        self._capacity = per_minute
        self._level = float(per_minute)
        self._at = now

    def change_rate(self, per_minute: int, now: float) -> None:
        """From now on; what is owed stays owed."""
        self._fill(now)
        self._capacity = per_minute
        self._level = min(self._level, float(per_minute))

    def wait_s(self, amount: int, now: float) -> float:
        """Seconds until `amount` is there; 0: it is. What is more than the bucket holds waits for a
        full one, because it would never be there."""
        self._fill(now)
        missing = min(amount, self._capacity) - self._level
        return missing * MINUTE_S / self._capacity if missing > _ROUNDING else 0.0

    def take(self, amount: int, now: float) -> None:
        """Use so much, whether it is there or not."""
        self._fill(now)
        self._level -= amount

    def _fill(self, now: float) -> None:
        gained = max(0.0, now - self._at) * self._capacity / MINUTE_S
        self._level = min(float(self._capacity), self._level + gained)
        self._at = max(self._at, now)
