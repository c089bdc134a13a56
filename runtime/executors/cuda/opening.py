"""Opens a CUDA engine: is there a GPU of its SM, a driver for its code, memory for it?"""

from dataclasses import dataclass
from typing import Any

from trtc.protos.errors import EngineCorruptError, EngineIncompatibleError, EnvironmentFault
from trtc.protos.launches import (
    KERNELS_DIR,
    LAUNCHES_FILE,
    TACTICS_PREFIX,
    TacticTable,
    read_launches,
    read_tactics,
)
from trtc.protos.manifest import PLAN_FILE, WEIGHTS_FILE
from trtc.runtime.executors.cuda.executor import CudaExecutor
from trtc.runtime.executors.cuda.program import CudaEngineFiles
from trtc.runtime.executors.opening import OpenRequest
from trtc.runtime.executors.weights import dummy_weights, map_weights

_POOL_SHARE = 0.95
_RESERVED_BYTES = 768 << 20
"""Captured graphs, cuBLAS's workspace, and what the context grows by."""
_MIN_DRIVER = 13000
"""CUDA version of the oldest driver that takes the cubins, as cuDriverGetVersion counts."""


@dataclass(frozen=True)
class CudaOpening:
    """A CUDA engine on the GPU that it was built for (implements Opening)."""

    request: OpenRequest
    torch: Any

    @property
    def files(self) -> tuple[str, ...]:
        listed = self.request.manifest.files
        code = (name for name in listed if name.startswith((f"{KERNELS_DIR}/", TACTICS_PREFIX)))
        weights = () if self.request.dummy_weights else (WEIGHTS_FILE,)
        return (PLAN_FILE, LAUNCHES_FILE, *code, *weights)

    @property
    def pool_share(self) -> float:
        return _POOL_SHARE

    @property
    def max_pages(self) -> int | None:
        return None

    def free_bytes(self) -> int:
        free, _ = self.torch.cuda.mem_get_info()
        ledger = self.request.manifest.ledger
        return int(free) - ledger.weights - ledger.activations - _RESERVED_BYTES

    def open(self, num_pages: int) -> CudaExecutor:
        from trtc.runtime.executors.cuda.torch_device import TorchDevice

        engine, manifest = self.request.engine, self.request.manifest
        launches = read_launches(engine)
        for code in launches.kernels:
            if code.file not in manifest.files:
                raise EngineCorruptError("is not listed", field=f"manifest.json: files.{code.file}")
        return CudaExecutor(
            CudaEngineFiles(
                engine=engine,
                launches=launches,
                weights=dummy_weights(engine / PLAN_FILE)
                if self.request.dummy_weights
                else map_weights(engine / WEIGHTS_FILE, manifest.ledger.weights),
                tactics=self._tactics(),
            ),
            TorchDevice(),
            limits=manifest.limits,
            kv=manifest.kv,
            vocab_size=manifest.model.vocab_size,
            num_pages=num_pages,
        )

    def _tactics(self) -> TacticTable | None:
        listed = self.request.manifest.files
        names = [name for name in listed if name.startswith(TACTICS_PREFIX)]
        return read_tactics(self.request.engine / names[0]) if names else None


def device_name() -> str:
    """What the driver calls the GPU."""
    import torch

    name: str = torch.cuda.get_device_name()
    return name


def prepare_cuda(request: OpenRequest) -> CudaOpening:
    """Check the GPU and its driver.

    Raises:
        EnvironmentFault: no PyTorch with CUDA, no GPU, or a driver that is too old.
        EngineIncompatibleError: a GPU of another SM.
    """
    install = "pip install 'trtc[cuda]' on a machine with an NVIDIA GPU"
    try:
        import torch
        from cuda.bindings import driver
    except ImportError as error:
        raise EnvironmentFault(
            f"a CUDA engine needs PyTorch and cuda-bindings ({error})",
            field="manifest.json: target.kind",
            remedy=install,
        ) from error
    if not torch.cuda.is_available():
        raise EnvironmentFault(
            "a CUDA engine needs an NVIDIA GPU, its driver and a CUDA build of PyTorch, and "
            f"torch {torch.__version__} finds none",
            field="manifest.json: target.kind",
            remedy="Serve it where there is a GPU, or build with --target cpu",
        )
    _, version = driver.cuDriverGetVersion()
    if version < _MIN_DRIVER:
        raise EnvironmentFault(
            f"it is for CUDA {version // 1000}.{version % 1000 // 10}, and the engine's code needs "
            f"{_MIN_DRIVER // 1000}.{_MIN_DRIVER % 1000 // 10}",
            field="NVIDIA driver",
            remedy="Install driver 580 or newer",
        )
    major, minor = torch.cuda.get_device_capability()
    found, archs = f"sm_{major}{minor}", request.manifest.target.archs
    if found not in archs:
        raise EngineIncompatibleError(
            f"the engine has code for {', '.join(archs)}, this GPU is {found}",
            field="manifest.json: target.archs",
            remedy=f"Build with --target cuda:{found}",
        )
    return CudaOpening(request, torch)
