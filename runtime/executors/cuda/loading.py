"""Loads a CUDA engine, or one rank of it, onto a GPU that has been checked."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

from trtc.protos.errors import EngineCorruptError
from trtc.protos.launch_plan import (
    KERNELS_DIR,
    LAUNCHES_FILE,
    TacticTable,
    read_launches,
    read_tactics,
)
from trtc.protos.manifest import PLAN_FILE, TACTICS_PREFIX, weights_files
from trtc.runtime.device.cuda_driver import CudaDriverDevice
from trtc.runtime.executors.cuda.device import HostArray, HostBytes, Seat
from trtc.runtime.executors.cuda.executor import CudaExecutor
from trtc.runtime.executors.cuda.gpu_device import GpuDevice
from trtc.runtime.executors.cuda.program import CudaEngineFiles
from trtc.runtime.executors.opening import OpenRequest
from trtc.runtime.executors.weights import WeightsFile, dummy_weights
from trtc.runtime.integrity.launch_relations import check_launches

_POOL_SHARE = 0.95
_RESERVED_BYTES = 768 << 20
"""Memory for captured graphs, cuBLAS's workspace and growth of the context."""
_NCCL_BYTES = 768 << 20
"""Memory that NCCL uses on each of several GPUs, for buffers between all pairs."""


@dataclass(frozen=True)
class GpuOpening:
    """The part of Opening that all CUDA engines share, on one or several GPUs."""

    request: OpenRequest

    @property
    def files(self) -> tuple[str, ...]:
        """The files that the ranks load."""
        manifest, of_code = self.request.manifest, (f"{KERNELS_DIR}/", TACTICS_PREFIX)
        code = (name for name in manifest.files if name.startswith(of_code))
        weights = () if self.request.dummy_weights else weights_files(manifest.target.tp)
        return (PLAN_FILE, LAUNCHES_FILE, *code, *weights)

    @property
    def pool_share(self) -> float:
        return _POOL_SHARE

    @property
    def max_pages(self) -> int | None:
        return None


def room_for_pool(request: OpenRequest, free_bytes: int) -> int:
    """Bytes of a GPU's free memory that are left when the engine is loaded."""
    ledger = request.manifest.ledger
    reserved = _RESERVED_BYTES + (_NCCL_BYTES if request.manifest.target.tp > 1 else 0)
    return free_bytes - ledger.weights - ledger.activations - reserved


def open_executor(
    request: OpenRequest, num_pages: int, gpu: CudaDriverDevice, seat: Seat | None = None
) -> CudaExecutor:
    """Load an engine, or one rank of it, onto a GPU, which the executor closes.

    Raises:
        EngineCorruptError: it refers to code that its manifest does not list.
        EnvironmentFault: a library is missing, there is too little memory, or the driver refuses.
    """
    engine, manifest = request.engine, request.manifest
    launches = read_launches(engine)
    check_launches(launches)
    for code in launches.kernels:
        if code.file not in manifest.files:
            raise EngineCorruptError("is not listed", field=f"manifest.json: files.{code.file}")
    with _weights(request, 0 if seat is None else seat.rank) as weights:
        return CudaExecutor(
            CudaEngineFiles(engine, launches, weights, _tactics(request)),
            GpuDevice(gpu, seat),
            limits=manifest.limits,
            kv=manifest.kv,
            vocab_size=manifest.model.vocab_size,
            num_pages=num_pages,
        )


@contextmanager
def _weights(request: OpenRequest, rank: int) -> Iterator[HostBytes]:
    """Context manager: the weights, open while they are copied."""
    if request.weights is not None:
        yield HostArray(request.weights)
        return
    if request.dummy_weights:
        yield HostArray(dummy_weights(request.engine / PLAN_FILE))
        return
    name = weights_files(request.manifest.target.tp)[rank]
    size, found = request.manifest.ledger.weights, request.found.get(name)
    with closing(WeightsFile(request.engine / name, size, found)) as file:
        yield file


def _tactics(request: OpenRequest) -> TacticTable | None:
    names = [name for name in request.manifest.files if name.startswith(TACTICS_PREFIX)]
    return read_tactics(request.engine / names[0]) if names else None
