"""Opens a CUDA engine of several ranks: one process per GPU, started while files are verified."""

from dataclasses import dataclass

from trtc.protos.errors import EnvironmentFault
from trtc.runtime.device.cuda_driver import CudaDriverDevice
from trtc.runtime.device.driver_api import DriverApi
from trtc.runtime.executors.cuda.device import Seat
from trtc.runtime.executors.cuda.loading import GpuOpening, open_executor, room_for_pool
from trtc.runtime.executors.cuda.nccl import make_rendezvous
from trtc.runtime.executors.cuda.rank import command
from trtc.runtime.executors.opening import OpenRequest
from trtc.runtime.executors.ranks.executor import ShardedExecutor, open_ranks
from trtc.runtime.executors.ranks.group import RankGroup


@dataclass(frozen=True)
class ShardedOpening(GpuOpening):
    """Rank 0 in this process, and the others in theirs."""

    group: RankGroup
    gpu: CudaDriverDevice
    """GPU of rank 0."""

    def free_bytes(self) -> int:
        """Free bytes of the GPU that has the least."""
        least = min(self.gpu.free_bytes(), *self.group.free_bytes())
        return room_for_pool(self.request, least)

    def close(self) -> None:
        self.group.close()
        self.gpu.close()

    def open(self, num_pages: int) -> ShardedExecutor:
        ranks = self.request.manifest.target.tp
        seat = Seat(0, ranks, make_rendezvous())
        return open_ranks(
            self.group,
            engine=self.request.engine,
            num_pages=num_pages,
            dummy_weights=self.request.dummy_weights,
            rendezvous=seat.rendezvous,
            local=lambda: open_executor(self.request, num_pages, self.gpu, seat),
        )


def start_ranks(request: OpenRequest, api: DriverApi) -> ShardedOpening:
    """Raises: EnvironmentFault: the system refuses to start their processes."""
    ranks = request.manifest.target.tp
    group = RankGroup([command(rank) for rank in range(1, ranks)])
    try:
        return ShardedOpening(request, group, CudaDriverDevice(api))
    except EnvironmentFault:
        group.close()
        raise
