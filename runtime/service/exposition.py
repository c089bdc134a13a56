"""Metrics in Prometheus' text format, made at each scrape.

instruments ─┐
loops ───────┴─► our metrics ─► their twins under another server's names ─► text
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from trtc.runtime.engine.loop import LoopStats
from trtc.runtime.service.instruments import Counter, Family, Gauge, Histogram
from trtc.runtime.service.metric_twins import TWINS, TwinCollector
from trtc.runtime.service.metrics import LOOP_READINGS, ServerMetrics


class Exposition:
    """All metrics of a server."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self.registry = CollectorRegistry()
        """Our own metrics, without twins."""
        self.registry.register(FamilyCollector(metrics.families))
        self.registry.register(LoopCollector(lambda: metrics.read_loops()))
        self._twins = CollectorRegistry()
        self._twins.register(TwinCollector(self.registry, *TWINS[metrics.compat]))

    def text(self) -> bytes:
        """The metrics in Prometheus' text format; takes milliseconds. Thread-safe."""
        return generate_latest(self.registry) + generate_latest(self._twins)


class FamilyCollector(Collector):
    """Collects instruments."""

    def __init__(self, families: Sequence[Family[Any]]) -> None:
        self._families = families

    def describe(self) -> Iterator[Metric]:
        return (_empty(one) for one in self._families)

    def collect(self) -> Iterator[Metric]:
        for family in self._families:
            metric = _empty(family)
            for values, value in family.series():
                labels = dict(zip(family.label_names, values, strict=True))
                _WRITERS[type(family)](metric, family, labels, value)
            yield metric


def _empty(family: Family[Any]) -> Metric:
    return Metric(family.name, family.help, type(family).__name__.lower())


def _write_counter(metric: Metric, family: Counter, labels: dict[str, str], value: Any) -> None:
    metric.add_sample(f"{family.name}_total", labels, value.value)
    metric.add_sample(f"{family.name}_created", labels, value.created_at)


def _write_gauge(metric: Metric, family: Gauge, labels: dict[str, str], value: Any) -> None:
    metric.add_sample(family.name, labels, value.value)


def _write_histogram(metric: Metric, family: Histogram, labels: dict[str, str], value: Any) -> None:
    counts, total = value.read()
    for bound, count in zip((*family.bounds, float("inf")), counts, strict=True):
        le = floatToGoString(bound)  # type: ignore[no-untyped-call]
        metric.add_sample(f"{family.name}_bucket", {**labels, "le": le}, count)
    metric.add_sample(f"{family.name}_count", labels, counts[-1])
    metric.add_sample(f"{family.name}_sum", labels, total)
    metric.add_sample(f"{family.name}_created", labels, value.created_at)


_WRITERS: Mapping[type, Callable[..., None]] = {
    Counter: _write_counter,
    Gauge: _write_gauge,
    Histogram: _write_histogram,
}


class LoopCollector(Collector):
    """Reads every loop's statistics at each scrape, so that steps have no overhead."""

    def __init__(self, read: Callable[[], Mapping[str, LoopStats]]) -> None:
        self._read = read

    def describe(self) -> Iterator[Metric]:
        return self._families({})

    def collect(self) -> Iterator[Metric]:
        return self._families(self._read())

    def _families(self, readings: Mapping[str, LoopStats]) -> Iterator[Metric]:
        for row in LOOP_READINGS:
            kind = CounterMetricFamily if row.is_counter else GaugeMetricFamily
            family = kind(f"trtc_{row.name}", row.help, labels=["model_name"])
            for model, reading in readings.items():
                family.add_metric([model], row.value(reading))
            yield family
