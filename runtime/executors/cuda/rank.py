"""The process of a rank other than 0 of a CUDA engine: python -m trtc.runtime.executors.cuda.rank.

Arguments: the rank, which is also the number of its GPU, and the number of the socket to rank 0.
"""

import os
import socket
import sys
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from trtc.protos.manifest import read_manifest
from trtc.runtime.device.cuda_driver import CudaDriverDevice
from trtc.runtime.device.driver_api import DriverApi
from trtc.runtime.executors.cuda.device import Seat
from trtc.runtime.executors.cuda.executor import CudaExecutor
from trtc.runtime.executors.cuda.loading import open_executor
from trtc.runtime.executors.opening import OpenRequest
from trtc.runtime.executors.ranks.link import Link
from trtc.runtime.executors.ranks.messages import Open, Order
from trtc.runtime.executors.ranks.worker import serve_rank


class CudaRank:
    """One GPU (implements RankHost)."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    @cached_property
    def _gpu(self) -> CudaDriverDevice:
        return CudaDriverDevice(DriverApi("cuda"), self._rank)

    def free_bytes(self) -> int:
        return self._gpu.free_bytes()

    def open(self, order: Open) -> CudaExecutor:
        engine = Path(order.engine)
        manifest = read_manifest(engine)
        request = OpenRequest(engine, manifest, None, order.dummy_weights)
        seat = Seat(order.rank, manifest.target.tp, order.rendezvous)
        return open_executor(request, order.num_pages, self._gpu, seat)


def command(rank: int) -> Sequence[str]:
    """The command of a rank's process, without the number of its socket."""
    return (sys.executable, "-m", __name__, str(rank))


def main() -> None:
    rank, descriptor = map(int, sys.argv[1:])
    link: Link[Order] = Link(socket.socket(fileno=descriptor), Order)
    status = serve_rank(link, CudaRank(rank))
    # Skips CUDA's exit handlers, which may wait for other ranks; the driver frees everything.
    os._exit(status)


if __name__ == "__main__":
    main()
