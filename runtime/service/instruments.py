"""Counters, gauges and histograms: numbers by label values, which any thread may change.

prometheus_client has the same, but it takes longer to import than a small engine to open, and a
server counts requests before anybody scrapes it. `exposition` hands these to it at a scrape.
"""

import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Generic, TypeVar

ValueT = TypeVar("ValueT")


class Family(Generic[ValueT]):
    """A metric: one value for each combination of label values that was asked for.

    Args:
        name: without the `_total` of a counter.
        label_names: (): it has one value, from the start.
        make: a value before its first change.
    """

    def __init__(
        self, name: str, help: str, label_names: Sequence[str], make: Callable[[], ValueT]
    ) -> None:
        self.name = name
        self.help = help
        self.label_names = tuple(label_names)
        self._make = make
        self._lock = threading.Lock()
        self._values: dict[tuple[str, ...], ValueT] = {}
        if not label_names:
            self.labels()

    def labels(self, *values: str) -> ValueT:
        """The value with these label values, in the order of `label_names`."""
        found = self._values.get(values)
        if found is not None:
            return found
        assert len(values) == len(self.label_names), (self.name, values)
        with self._lock:
            return self._values.setdefault(values, self._make())

    def remove(self, *values: str) -> None:
        """Expose the value with these label values no more."""
        with self._lock:
            self._values.pop(values, None)

    def series(self) -> list[tuple[tuple[str, ...], ValueT]]:
        """Label values and value, in the order in which they were first asked for."""
        with self._lock:
            return list(self._values.items())


class CounterValue:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.created_at = time.time()
        self.value = 0.0

    def inc(self, amount: float = 1) -> None:
        with self._lock:
            self.value += amount


class GaugeValue:
    def __init__(self) -> None:
        self.value = 0.0

    def set(self, value: float) -> None:
        self.value = float(value)


class HistogramValue:
    """
    Args:
        bounds: upper bounds of the buckets, inclusive, ascending; another bucket has the rest.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._lock = threading.Lock()
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self.created_at = time.time()

    def observe(self, value: float) -> None:
        bucket = bisect_left(self._bounds, value)
        with self._lock:
            self._counts[bucket] += 1
            self._sum += value

    def read(self) -> tuple[list[int], float]:
        """How many observations are at most as large as each bound, and how many there are; and
        their sum."""
        with self._lock:
            return list(accumulate(self._counts)), self._sum


class Counter(Family[CounterValue]):
    """Numbers that only grow."""

    def __init__(self, name: str, help: str, label_names: Sequence[str] = ()) -> None:
        super().__init__(name, help, label_names, CounterValue)

    def inc(self, amount: float = 1) -> None:
        """Of a counter without labels."""
        self.labels().inc(amount)


class Gauge(Family[GaugeValue]):
    """Numbers that are as they were last set."""

    def __init__(self, name: str, help: str, label_names: Sequence[str] = ()) -> None:
        super().__init__(name, help, label_names, GaugeValue)


class Histogram(Family[HistogramValue]):
    """Numbers of observations by size."""

    def __init__(
        self, name: str, help: str, label_names: Sequence[str], bounds: Sequence[float]
    ) -> None:
        super().__init__(name, help, label_names, lambda: HistogramValue(bounds))
        self.bounds = tuple(bounds)
