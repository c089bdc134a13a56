"""A GPU through the CUDA driver API, as cuda-bindings gives it."""

import ctypes
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from trtc.protos.errors import EnvironmentFault
from trtc.runtime.device.base import ALIGNMENT, Bytes, DriverKernel

_INSTALL = "pip install 'trtc[tensorrt]'"


def load_driver() -> Any:
    """The module `cuda.bindings.driver` over an initialised driver.

    Raises:
        EnvironmentFault: the package, the driver or a GPU is missing.
    """
    try:
        driver = importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise EnvironmentFault(
            f"is needed to run on a GPU and does not load ({error})",
            field="cuda-bindings",
            remedy=_INSTALL,
        ) from error
    try:
        (status,) = driver.cuInit(0)
    except RuntimeError as error:  # what cuda-bindings says when libcuda.so.1 is not to be found
        raise EnvironmentFault(
            f"does not load ({error})",
            field="libcuda.so.1",
            remedy="Install NVIDIA's driver; in a container, start it with GPUs (--gpus all)",
        ) from error
    if status != driver.CUresult.CUDA_SUCCESS:
        raise EnvironmentFault(
            f"has no GPU to give ({_describe(driver, status)})",
            field="the CUDA driver",
            remedy="See nvidia-smi; in a container, start it with GPUs (--gpus all)",
        )
    return driver


class CudaDriverDevice:
    """GPU `ordinal` of this process, in its primary context (implements DriverDevice)."""

    def __init__(self, ordinal: int = 0) -> None:
        """Open the GPU and make it current.

        Raises:
            EnvironmentFault: there is none, or the driver refuses.
        """
        self._driver = load_driver()
        self._device = self._call("cuDeviceGet", ordinal)
        self._context = self._call("cuDevicePrimaryCtxRetain", self._device)
        self._memory: list[Any] = []
        self._host_memory: list[int] = []
        self._modules: list[Any] = []
        self._graphs: dict[int, Any] = {}
        self._closed = False
        self.make_current()
        flags = self._driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        self._stream = self._call("cuStreamCreate", flags.value)

    @property
    def stream(self) -> int:
        return int(self._stream)

    def make_current(self) -> None:
        self._call("cuCtxSetCurrent", self._context)

    def free_bytes(self) -> int:
        free, _ = self._call("cuMemGetInfo")
        return int(free)

    def allocate(self, num_bytes: int) -> int:
        status, address = self._driver.cuMemAlloc(max(num_bytes, ALIGNMENT))
        if status == self._driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise EnvironmentFault(
                f"{num_bytes / 1e9:.2f} GB do not fit the {self.free_bytes() / 1e9:.2f} GB of GPU "
                "memory that are free",
                field="--kv-bytes",
                remedy="Give a smaller KV pool, or free the GPU",
            )
        self._check("cuMemAlloc", status)
        self._memory.append(address)
        return int(address)

    def host_buffer(self, num_bytes: int) -> Bytes:
        address = int(self._call("cuMemHostAlloc", num_bytes, 0))
        self._host_memory.append(address)
        return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))

    def load_kernel(self, code: bytes, entry: str) -> int:
        module = self._call("cuModuleLoadData", code)
        self._modules.append(module)
        return int(self._call("cuModuleGetFunction", module, entry.encode()))

    def upload(self, address: int, source: Bytes) -> None:
        size = source.nbytes
        self._call("cuMemcpyHtoDAsync", address, source.ctypes.data, size, self._stream)

    def download(self, target: Bytes, address: int) -> None:
        size = target.nbytes
        self._call("cuMemcpyDtoHAsync", target.ctypes.data, address, size, self._stream)

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        self._call("cuMemcpyDtoDAsync", target, source, num_bytes, self._stream)

    def zero(self, address: int, num_bytes: int) -> None:
        self._call("cuMemsetD8Async", address, 0, num_bytes, self._stream)

    def launch(
        self, kernel: DriverKernel, grid: tuple[int, int], arguments: Sequence[int | np.int32]
    ) -> None:
        values = [_packed(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        self._call(
            "cuLaunchKernel",
            kernel.handle,
            *(*grid, 1),
            *(kernel.num_threads, 1, 1),
            kernel.shared_bytes,
            self._stream,
            ctypes.addressof(pointers),
            0,
        )

    def capture(self, work: Callable[[], None]) -> int | None:
        mode = self._driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self._call("cuStreamBeginCapture", self._stream, mode)
        recorded = True
        try:
            work()
        except EnvironmentFault:
            recorded = False
        status, graph = self._driver.cuStreamEndCapture(self._stream)
        if status != self._driver.CUresult.CUDA_SUCCESS:
            return None
        if not recorded:
            self._call("cuGraphDestroy", graph)
            return None
        executable = self._call("cuGraphInstantiate", graph, 0)
        self._call("cuGraphDestroy", graph)
        self._graphs[int(executable)] = executable
        return int(executable)

    def replay(self, graph: int) -> None:
        self._call("cuGraphLaunch", self._graphs[graph], self._stream)

    def drop_graph(self, graph: int) -> None:
        self._call("cuGraphExecDestroy", self._graphs.pop(graph))

    def synchronize(self) -> None:
        self._call("cuStreamSynchronize", self._stream)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.make_current()
        for graph in list(self._graphs):
            self.drop_graph(graph)
        for module in self._modules:
            self._call("cuModuleUnload", module)
        for address in self._memory:
            self._call("cuMemFree", address)
        for host_address in self._host_memory:
            self._call("cuMemFreeHost", host_address)
        self._call("cuStreamDestroy", self._stream)
        self._call("cuDevicePrimaryCtxRelease", self._device)

    def _call(self, function: str, *arguments: Any) -> Any:
        """What a driver function gives beside its status: nothing, a value, or several."""
        status, *values = getattr(self._driver, function)(*arguments)
        self._check(function, status)
        return values[0] if len(values) == 1 else values

    def _check(self, function: str, status: Any) -> None:
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise EnvironmentFault(
                f"{function} failed: {_describe(self._driver, status)}",
                field="the CUDA driver",
                remedy="See nvidia-smi and dmesg; a GPU that has failed needs a new process",
            )


def _packed(argument: int | np.int32) -> Any:
    if isinstance(argument, np.int32):
        return ctypes.c_int32(int(argument))
    return ctypes.c_uint64(argument)


def _describe(driver: Any, status: Any) -> str:
    _, text = driver.cuGetErrorString(status)
    return f"{status.name}: {text.decode()}" if text else str(status)
