"""A GPU through the CUDA driver API of cuda-bindings."""

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from trtc.protos.errors import EnvironmentFault, InvariantError
from trtc.runtime.device.base import ALIGNMENT, Bytes, DriverKernel
from trtc.runtime.device.driver_api import DriverApi, DriverRefusal


class CudaDriverDevice:
    """GPU `ordinal` of this process, in its primary context (implements DriverDevice)."""

    def __init__(self, api: DriverApi, ordinal: int = 0) -> None:
        """Open the GPU and make it current.

        Raises:
            EnvironmentFault: there is no such GPU, or the driver refuses.
        """
        self._api = api
        self.driver = api.driver
        """The module cuda.bindings.driver, for its types."""
        self._bound = threading.local()
        """`is_current`: whether the context is current in this thread."""
        self._device = api.call("cuDeviceGet", ordinal)
        self._context = api.call("cuDevicePrimaryCtxRetain", self._device)
        self._memory: list[Any] = []
        self._host_memory: list[int] = []
        self._modules: list[Any] = []
        self._graphs: dict[int, Any] = {}
        self._events: list[int] = []
        self._closed = False
        self.make_current()
        flags = self.driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        self._stream = self.call("cuStreamCreate", flags.value)
        self._copy_stream = self.call("cuStreamCreate", flags.value)

    @property
    def stream(self) -> int:
        return int(self._stream)

    def make_current(self) -> None:
        self._check_open()
        self._api.call("cuCtxSetCurrent", self._context)
        self._bound.is_current = True

    def call(self, function: str, *arguments: Any) -> Any:
        """DriverApi.call with the GPU's context made current in this thread."""
        self._bind()
        return self._api.call(function, *arguments)

    def free_bytes(self) -> int:
        free, _ = self.call("cuMemGetInfo")
        return int(free)

    def allocate(self, num_bytes: int) -> int:
        try:
            address = self.call("cuMemAlloc", max(num_bytes, ALIGNMENT))
        except DriverRefusal as error:
            if error.status != "CUDA_ERROR_OUT_OF_MEMORY":
                raise
            raise EnvironmentFault(
                f"{num_bytes / 1e9:.2f} GB do not fit the {self.free_bytes() / 1e9:.2f} GB of GPU "
                "memory that are free",
                field="--kv-bytes",
                remedy="Give a smaller KV pool, or free the GPU",
            ) from error
        self._memory.append(address)
        return int(address)

    def host_buffer(self, num_bytes: int) -> Bytes:
        address = int(self.call("cuMemHostAlloc", num_bytes, 0))
        self._host_memory.append(address)
        return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))

    def load_kernel(self, code: bytes, entry: str) -> int:
        module = self.call("cuModuleLoadData", code)
        self._modules.append(module)
        return int(self.call("cuModuleGetFunction", module, entry.encode()))

    def upload(self, address: int, source: Bytes) -> None:
        size = source.nbytes
        self.call("cuMemcpyHtoDAsync", address, source.ctypes.data, size, self._stream)

    def upload_beside(self, address: int, source: Bytes, *, after: int, done: int) -> None:
        """Copy on the copy stream: behind the event `after`, whatever the stream does by then.
        What the stream gets from now on waits for the copy, of which `done` is the event."""
        size, copies = source.nbytes, self._copy_stream
        self.call("cuStreamWaitEvent", copies, after, 0)
        self.call("cuMemcpyHtoDAsync", address, source.ctypes.data, size, copies)
        self.call("cuEventRecord", done, copies)
        self.call("cuStreamWaitEvent", self._stream, done, 0)

    def download(self, target: Bytes, address: int) -> None:
        size = target.nbytes
        self.call("cuMemcpyDtoHAsync", target.ctypes.data, address, size, self._stream)

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        self.call("cuMemcpyDtoDAsync", target, source, num_bytes, self._stream)

    def zero(self, address: int, num_bytes: int) -> None:
        self.call("cuMemsetD8Async", address, 0, num_bytes, self._stream)

    def launch(
        self, kernel: DriverKernel, grid: tuple[int, int], arguments: Sequence[int | np.int32]
    ) -> None:
        values = [_packed(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        self.call(
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
        try:
            return self.record(work)
        except EnvironmentFault:
            return None

    def record(self, work: Callable[[], None]) -> int:
        """Like `capture`, for work that can be captured.

        Raises:
            EnvironmentFault: it cannot be captured, or the driver refuses.
        """
        mode = self.driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self.call("cuStreamBeginCapture", self._stream, mode)
        try:
            work()
        except BaseException:
            _, unfinished = self.driver.cuStreamEndCapture(self._stream)
            if int(unfinished):
                self.call("cuGraphDestroy", unfinished)
            raise
        graph = self.call("cuStreamEndCapture", self._stream)
        executable = self.call("cuGraphInstantiate", graph, 0)
        self.call("cuGraphDestroy", graph)
        self._graphs[int(executable)] = executable
        return int(executable)

    def replay(self, graph: int) -> None:
        self.call("cuGraphLaunch", self._graphs[graph], self._stream)

    def drop_graph(self, graph: int) -> None:
        self.call("cuGraphExecDestroy", self._graphs.pop(graph))

    def drop_graphs(self) -> None:
        for graph in list(self._graphs):
            self.drop_graph(graph)

    def synchronize(self) -> None:
        self.call("cuStreamSynchronize", self._stream)

    def event(self) -> int:
        """A CUDA event, held until `close`; before it is first recorded it counts as complete."""
        flags = self.driver.CUevent_flags.CU_EVENT_DISABLE_TIMING
        self._events.append(int(self.call("cuEventCreate", flags.value)))
        return self._events[-1]

    def set_event(self, event: int) -> None:
        """Record the event: it completes when all work that is on the stream now is done."""
        self.call("cuEventRecord", event, self._stream)

    def has_come(self, event: int) -> bool:
        self._bind()
        (status,) = self.driver.cuEventQuery(event)
        # Without an exception: a rank polls many times per millisecond.
        if status == self.driver.CUresult.CUDA_ERROR_NOT_READY:
            return False
        self._api.check("cuEventQuery", status)
        return True

    def await_event(self, event: int) -> None:
        self.call("cuEventSynchronize", event)

    def close(self) -> None:
        if self._closed:
            return
        self.make_current()
        try:
            self._free()
        finally:
            self._closed = True

    def _free(self) -> None:
        self.drop_graphs()
        for module in self._modules:
            self.call("cuModuleUnload", module)
        for address in self._memory:
            self.call("cuMemFree", address)
        for host_address in self._host_memory:
            self.call("cuMemFreeHost", host_address)
        for event in self._events:
            self.call("cuEventDestroy", event)
        self.call("cuStreamDestroy", self._copy_stream)
        self.call("cuStreamDestroy", self._stream)
        self.call("cuDevicePrimaryCtxRelease", self._device)

    def _bind(self) -> None:
        self._check_open()
        if not getattr(self._bound, "is_current", False):
            self.make_current()

    def _check_open(self) -> None:
        if self._closed:
            raise InvariantError("the GPU is closed: its addresses and handles mean nothing")


def _packed(argument: int | np.int32) -> Any:
    if isinstance(argument, np.int32):
        return ctypes.c_int32(int(argument))
    return ctypes.c_uint64(argument)
