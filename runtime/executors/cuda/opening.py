"""Opens a CUDA engine: checks the GPU's SM, the driver and the memory."""

from dataclasses import dataclass
from itertools import permutations

from trtc.plugins.gpu.probe import device_sm
from trtc.protos.errors import EngineIncompatibleError, EnvironmentFault
from trtc.protos.manifest import Manifest
from trtc.runtime.device.cuda_driver import CudaDriverDevice
from trtc.runtime.device.driver_api import DriverApi
from trtc.runtime.executors.cuda.executor import CudaExecutor
from trtc.runtime.executors.cuda.loading import GpuOpening, open_executor, room_for_pool
from trtc.runtime.executors.opening import Opening, OpenRequest

_MIN_DRIVER = 13000
"""CUDA version of the oldest driver that supports the cubins, as from cuDriverGetVersion."""


@dataclass(frozen=True)
class CudaOpening(GpuOpening):
    """A CUDA engine on the GPU that it was built for."""

    gpu: CudaDriverDevice

    def free_bytes(self) -> int:
        return room_for_pool(self.request, self.gpu.free_bytes())

    def close(self) -> None:
        self.gpu.close()

    def open(self, num_pages: int) -> CudaExecutor:
        return open_executor(self.request, num_pages, self.gpu)


def device_name() -> str:
    """The driver's name of the GPU."""
    api = DriverApi("cuda")
    name: bytes = api.call("cuDeviceGetName", 256, api.call("cuDeviceGet", 0))
    return name.split(b"\0")[0].decode()


def prepare_cuda(request: OpenRequest) -> Opening:
    """Check the GPUs and their driver.

    Raises:
        EnvironmentFault: cuda-bindings or the driver is missing or too old, there are too few GPUs,
            or they cannot access each other's memory (P2P).
        EngineIncompatibleError: a GPU has another SM.
    """
    api = DriverApi("cuda")
    version = api.call("cuDriverGetVersion")
    if version < _MIN_DRIVER:
        raise EnvironmentFault(
            f"it is for CUDA {version // 1000}.{version % 1000 // 10}, and the engine's code needs "
            f"{_MIN_DRIVER // 1000}.{_MIN_DRIVER % 1000 // 10}",
            field="NVIDIA driver",
            remedy="Install driver 580 or newer",
        )
    ranks = request.manifest.target.tp
    _check_gpus(request.manifest, api)
    if ranks == 1:
        return CudaOpening(request, CudaDriverDevice(api))
    # Not imported for a single GPU, which saves milliseconds.
    from trtc.runtime.executors.cuda.sharded_opening import start_ranks

    return start_ranks(request, api)


def _check_gpus(manifest: Manifest, api: DriverApi) -> None:
    """Check that every rank has a GPU of the engine's SM, and that all have P2P access."""
    ranks, archs = manifest.target.tp, manifest.target.archs
    visible = api.call("cuDeviceGetCount")
    if visible < ranks:
        raise EnvironmentFault(
            f"the engine runs on {ranks} GPUs, and this machine shows {visible}",
            field="manifest.json: target.tp",
            remedy=f"Serve it where there are {ranks}, or build with a smaller --tp",
        )
    for index in range(ranks):
        found = f"sm_{device_sm(index)}"
        if found not in archs:
            named = "this GPU" if ranks == 1 else f"GPU {index}"
            raise EngineIncompatibleError(
                f"the engine has code for {', '.join(archs)}, {named} is {found}",
                field="manifest.json: target.archs",
                remedy=f"Build with --target cuda:{found}",
            )
    devices = [api.call("cuDeviceGet", index) for index in range(ranks)]
    for one, other in permutations(range(ranks), 2):
        if not api.call("cuDeviceCanAccessPeer", devices[one], devices[other]):
            raise EnvironmentFault(
                f"GPU {one} does not reach the memory of GPU {other}",
                field="manifest.json: target.tp",
                remedy="Choose linked GPUs with CUDA_VISIBLE_DEVICES (`nvidia-smi topo -p2p r` "
                "shows which are), or build without --tp",
            )
