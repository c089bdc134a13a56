"""Deadlines of live requests: a heap from which entries of ended requests are removed."""

import heapq
from collections.abc import Iterator

_MIN_STALE = 64
"""Entries of ended requests up to which the heap is not rebuilt."""


class Deadlines:
    """Deadlines of requests, by number. Each operation takes logarithmic time on average."""

    def __init__(self) -> None:
        self._of: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []
        """At most twice as many entries as there are deadlines, plus a constant."""

    def add(self, number: int, deadline: float) -> None:
        """Add a request's deadline; numbers are never reused."""
        self._of[number] = deadline
        heapq.heappush(self._heap, (deadline, number))

    def discard(self, number: int) -> None:
        """Forget a request, if it has a deadline."""
        if self._of.pop(number, None) is None:
            return
        if len(self._heap) > 2 * len(self._of) + _MIN_STALE:
            self._heap = [(deadline, number) for number, deadline in self._of.items()]
            heapq.heapify(self._heap)

    def take_overdue(self, now: float) -> Iterator[int]:
        """Numbers whose deadlines have passed, the earliest first; they are forgotten."""
        while self._heap and self._heap[0][0] <= now:
            _, number = heapq.heappop(self._heap)
            if self._of.pop(number, None) is not None:
                yield number

    def __len__(self) -> int:
        return len(self._of)

    @property
    def num_entries(self) -> int:
        """Entries in the heap, those of forgotten requests included."""
        return len(self._heap)
