"""A token bucket: limits a rate, with bursts.

    level(t) = min(capacity, level + rate * elapsed), capacity: what fills it in a minute

An action with a known cost is checked in advance and charged at once. An unknown cost, such as the
tokens of a completion, is charged as it arises: the level may fall below zero, and the next action
waits longer. So in T seconds at most capacity + rate * T is taken, plus the cost of the last action
that was not known in advance.
"""

MINUTE_S = 60.0
_ROUNDING = 1e-6
"""Tolerance for rounding errors of the level, so that the returned waiting time suffices."""


class TokenBucket:
    """Not thread-safe. Times are seconds of a monotonic clock."""

    def __init__(self, per_minute: int, now: float) -> None:
        self._capacity = per_minute
        self._level = float(per_minute)
        self._at = now

    def change_rate(self, per_minute: int, now: float) -> None:
        """Change the rate from now on; a negative level is kept."""
        self._fill(now)
        self._capacity = per_minute
        self._level = min(self._level, float(per_minute))

    def wait_s(self, amount: int, now: float) -> float:
        """Seconds until `amount` is available; 0: it is. An amount beyond the capacity waits for a
        full bucket."""
        self._fill(now)
        missing = min(amount, self._capacity) - self._level
        return missing * MINUTE_S / self._capacity if missing > _ROUNDING else 0.0

    def take(self, amount: int, now: float) -> None:
        """Take `amount`, even if it is not available."""
        self._fill(now)
        self._level -= amount

    def _fill(self, now: float) -> None:
        gained = max(0.0, now - self._at) * self._capacity / MINUTE_S
        self._level = min(float(self._capacity), self._level + gained)
        self._at = max(self._at, now)
