"""Instruments as prometheus_client's own say the same: it is the oracle."""

import re
import threading
from collections.abc import Sequence

import prometheus_client
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from trtc.runtime.service.exposition import FamilyCollector
from trtc.runtime.service.instruments import Counter, Gauge, Histogram

BOUNDS = (0.001, 0.5, 1.0, 2.5, 10000.0)
LABELS = st.sampled_from(["a", 'b"\\', "c\n"])
VALUES = st.floats(0, 1e6) | st.sampled_from(BOUNDS)


def text(registry: CollectorRegistry) -> str:
    """What is scraped; when a series began is as good as any other time."""
    found = generate_latest(registry).decode()
    return re.sub(r"^(\w+_created\S*) \S+$", r"\1 0", found, flags=re.MULTILINE)


@given(st.lists(st.tuples(LABELS, LABELS, VALUES), max_size=20), st.none() | LABELS)
def test_a_scrape_reads_as_one_of_prometheus_client_with_the_same_numbers(
    changes: Sequence[tuple[str, str, float]], removed: str | None
) -> None:
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    counter, their_counter = (
        Counter("trtc_a", "A.", ("x", "y")),
        prometheus_client.Counter("trtc_a", "A.", ("x", "y"), registry=theirs),
    )
    gauge, their_gauge = (
        Gauge("trtc_b", "B.", ("x",)),
        prometheus_client.Gauge("trtc_b", "B.", ("x",), registry=theirs),
    )
    histogram, their_histogram = (
        Histogram("trtc_c", "C.", ("x",), BOUNDS),
        prometheus_client.Histogram("trtc_c", "C.", ("x",), buckets=BOUNDS, registry=theirs),
    )
    plain, their_plain = (
        Counter("trtc_d", "D."),
        prometheus_client.Counter("trtc_d", "D.", registry=theirs),
    )
    ours.register(FamilyCollector([counter, gauge, histogram, plain]))
    for x, y, value in changes:
        for one in (counter, their_counter):
            one.labels(x, y).inc(value)
        for set_one in (gauge, their_gauge):
            set_one.labels(x).set(value)
        for observed in (histogram, their_histogram):
            observed.labels(x).observe(value)
        plain.inc()
        their_plain.inc()
    if removed in {x for x, _, _ in changes}:
        assert removed is not None
        gauge.remove(removed)
        their_gauge.remove(removed)
    assert text(ours) == text(theirs)


def test_no_change_of_another_thread_is_lost() -> None:
    counter, histogram = Counter("trtc_a", "A.", ("x",)), Histogram("trtc_b", "B.", (), (1.0,))

    def change() -> None:
        for _ in range(2000):
            counter.labels("a").inc()
            histogram.labels().observe(0.5)

    threads = [threading.Thread(target=change) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert counter.labels("a").value == 8000
    assert histogram.labels().read() == ([8000, 8000], 4000.0)
