"""A cache of CUDA graphs of repeated steps."""

import logging
from collections.abc import Callable

from trtc.runtime.device.base import DriverDevice
from trtc.runtime.executors.tensorrt_step import StepSizes

MAX_GRAPHS = 64
"""Most graphs; the least recently replayed one is evicted. Each has all launch parameters of a
step."""
_MAX_SEEN = 4096

GraphKey = tuple[int, StepSizes]
"""Profile and sizes. A graph also depends on addresses, which never change."""

_log = logging.getLogger(__name__)


class GraphCache:
    """Runs work directly or from a graph.

    At the first use of a key its work runs. At the second use it runs and is captured after that,
    because the library may initialise at first use of a shape; later uses replay the graph.
    """

    def __init__(self, device: DriverDevice, can_capture: Callable[[int], bool]) -> None:
        """`can_capture`: returns whether the work of a profile can be captured now."""
        self._device = device
        self._can_capture = can_capture
        self._graphs: dict[GraphKey, int] = {}
        """Graphs, least recently replayed first."""
        self._seen: dict[GraphKey, None] = {}
        self._enabled = True

    def run(self, key: GraphKey, work: Callable[[], None]) -> None:
        graph = self._graphs.pop(key, None)
        if graph is not None:
            self._graphs[key] = graph
            self._device.replay(graph)
            return
        work()
        if key not in self._seen:
            self._remember(key)
        elif self._enabled and self._can_capture(key[0]):
            self._capture(key, work)

    def _remember(self, key: GraphKey) -> None:
        self._seen[key] = None
        if len(self._seen) > _MAX_SEEN:
            del self._seen[next(iter(self._seen))]

    def _capture(self, key: GraphKey, work: Callable[[], None]) -> None:
        graph = self._device.capture(work)
        if graph is None:
            self._enabled = False
            _log.warning("a step cannot be captured: every step is launched call by call")
            return
        self._graphs[key] = graph
        if len(self._graphs) > MAX_GRAPHS:
            self._device.drop_graph(self._graphs.pop(next(iter(self._graphs))))
