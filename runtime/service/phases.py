"""Measures the phases of a server's start."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from trtc.runtime.service.metrics import ServerMetrics

_log = logging.getLogger("trtc.server")


@contextmanager
def phase(metrics: ServerMetrics, name: str, engine: str = "") -> Iterator[None]:
    """Context manager that logs and records the duration of the block, unless it raises."""
    begin = time.perf_counter()
    yield
    seconds = time.perf_counter() - begin
    metrics.startup.labels(f"{name}:{engine}" if engine else name).set(seconds)
    _log.info("phase=%s%s seconds=%.3f", name, f" engine={engine}" if engine else "", seconds)
