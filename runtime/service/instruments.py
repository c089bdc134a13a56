"""Thread-safe counters, gauges and histograms with labels.

prometheus_client has the same, but importing it takes longer than opening a small engine, and a
server counts requests before the first scrape. `exposition` converts these at a scrape.
"""

import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Generic, TypeVar

ValueT = TypeVar("ValueT")


class Family(Generic[ValueT]):
    """A metric: one value for each combination of label values in use.

    Args:
        name: name without the `_total` of a counter.
        label_names: names of labels; (): a single value, which exists from the start.
        make: makes an initial value.
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
        """The value for these label values, in the order of `label_names`; created if need be."""
        found = self._values.get(values)
        if found is not None:
            return found
        assert len(values) == len(self.label_names), (self.name, values)
        with self._lock:
            return self._values.setdefault(values, self._make())

    def remove(self, *values: str) -> None:
        """Remove the value for these label values."""
        with self._lock:
            self._values.pop(values, None)

    def series(self) -> list[tuple[tuple[str, ...], ValueT]]:
        """(label values, value) in the order of creation."""
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
    """A histogram.

    Args:
        bounds: inclusive upper bounds of the buckets, ascending; one more bucket has the rest.
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
        """(cumulative counts up to each bound and in total, sum of the observations)."""
        with self._lock:
            return list(accumulate(self._counts)), self._sum


class Counter(Family[CounterValue]):
    """Values that only increase."""

    def __init__(self, name: str, help: str, label_names: Sequence[str] = ()) -> None:
        super().__init__(name, help, label_names, CounterValue)

    def inc(self, amount: float = 1) -> None:
        """Increment a counter without labels."""
        self.labels().inc(amount)


class Gauge(Family[GaugeValue]):
    """Values that are set."""

    def __init__(self, name: str, help: str, label_names: Sequence[str] = ()) -> None:
        super().__init__(name, help, label_names, GaugeValue)


class Histogram(Family[HistogramValue]):
    """Distributions of observations."""

    def __init__(
        self, name: str, help: str, label_names: Sequence[str], bounds: Sequence[float]
    ) -> None:
        super().__init__(name, help, label_names, lambda: HistogramValue(bounds))
        self.bounds = tuple(bounds)
