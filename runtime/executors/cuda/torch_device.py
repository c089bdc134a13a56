"""A GPU by torch (memory, streams, graphs, cuBLASLt) and the driver API (cubins)."""

import atexit
import ctypes
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from cuda.bindings import driver

from trtc.protos.errors import EnvironmentFault
from trtc.runtime.executors.cuda.cublaslt import CublasLt, MatrixAt, ScalesAt
from trtc.runtime.executors.cuda.device import (
    Bytes,
    Graph,
    Kernel,
    Operand,
    Place,
    Product,
    Seat,
)
from trtc.runtime.executors.cuda.nccl import NcclCommunicator

_TORCH = {
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f8e4m3": torch.float8_e4m3fn,
    "i8": torch.int8,
}
_STATIC_SHARED_BYTES = 48 * 1024
"""More needs the function's limit raised."""
_WORKSPACE_BYTES = 32 << 20
"""For cuBLASLt's products, as much as it likes on this SM."""
_STAGE_BYTES = 32 << 20
_UPLOADERS = 4
_SEND_SLOTS = 4
"""Steps whose inputs may wait in pinned memory at once."""
_RESTART = "Restart the server"
_POLL_S = 20e-6
"""Between two looks at an event that another rank's end could keep from ever coming."""
_EXIT_S = 5
"""For CUDA's own end of a process whose GPU waits for a rank that is gone."""


@dataclass(frozen=True)
class TorchMemory:
    """Memory as a byte tensor."""

    tensor: torch.Tensor

    @property
    def num_bytes(self) -> int:
        return self.tensor.numel()


class TorchDevice:
    """CUDA device 0 of this process, or that of a rank (implements ProgramDevice)."""

    def __init__(self, seat: Seat | None = None) -> None:
        """Args: seat: of one of several ranks; blocks until all are there."""
        self._device = torch.device("cuda", 0 if seat is None else seat.rank)
        torch.cuda.set_device(self._device)
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._modules: list[Any] = []
        self._pool = torch.cuda.graph_pool_handle()
        self._slots = [(torch.empty(0, dtype=torch.uint8), _event()) for _ in range(_SEND_SLOTS)]
        self._next_slot = 0
        self._landings: list[tuple[torch.Tensor, torch.cuda.Event]] = []
        self._pinned: list[torch.Tensor] = []
        self._row_scales: dict[int, list[torch.Tensor]] = {}
        self._workspace = self.allocate(_WORKSPACE_BYTES)
        self._products = CublasLt(
            str(torch.version.cuda), self._workspace.tensor.data_ptr(), _WORKSPACE_BYTES
        )
        self._communicator = None if seat is None else NcclCommunicator(seat)
        self._abandoned = threading.Event()

    def allocate(self, num_bytes: int) -> TorchMemory:
        try:
            with torch.cuda.stream(self._stream):
                return TorchMemory(torch.zeros(num_bytes, dtype=torch.uint8, device=self._device))
        except torch.OutOfMemoryError as error:
            free, _ = torch.cuda.mem_get_info(self._device)
            raise EnvironmentFault(
                f"the GPU has {free / 1e9:.2f} GB free and {num_bytes / 1e9:.2f} GB are needed",
                field="GPU memory",
                remedy="Give a smaller --kv-bytes, or free the GPU",
            ) from error

    def upload(self, data: Bytes) -> TorchMemory:
        """Through pinned memory that several threads fill: a mapped file is read at their speed."""
        memory = self.allocate(len(data))
        stages = [
            torch.empty(_STAGE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(_UPLOADERS)
        ]
        events = [_event() for _ in stages]
        begins = range(0, len(data), _STAGE_BYTES)

        def fill(number: int, begin: int) -> torch.Tensor:
            stage, part = stages[number], data[begin : begin + _STAGE_BYTES]
            events[number].synchronize()
            np.copyto(stage.numpy()[: len(part)], part)
            return stage[: len(part)]

        with ThreadPoolExecutor(_UPLOADERS) as pool, torch.cuda.stream(self._stream):
            pending: list[tuple[int, int, Any]] = []
            for at, begin in enumerate(begins):
                if len(pending) == _UPLOADERS:
                    self._send_stage(memory, events, *pending.pop(0))
                pending.append((at % _UPLOADERS, begin, pool.submit(fill, at % _UPLOADERS, begin)))
            for one in pending:
                self._send_stage(memory, events, *one)
        self._stream.synchronize()
        return memory

    def _send_stage(
        self, memory: TorchMemory, events: list[torch.cuda.Event], number: int, begin: int, job: Any
    ) -> None:
        part = job.result()
        memory.tensor[begin : begin + len(part)].copy_(part, non_blocking=True)
        events[number].record(self._stream)

    def load(self, cubin: bytes, entry: str, num_threads: int, shared_bytes: int) -> Kernel:
        module = _checked(driver.cuModuleLoadData(cubin), f"{entry}: the driver refuses the code")
        self._modules.append(module)
        function = _checked(driver.cuModuleGetFunction(module, entry.encode()), entry)
        if shared_bytes > _STATIC_SHARED_BYTES:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _checked(driver.cuFuncSetAttribute(function, attribute, shared_bytes), entry)
        return Kernel(function, entry, num_threads, shared_bytes)

    def launch(
        self,
        kernel: Kernel,
        grid: tuple[int, int, int],
        arguments: Sequence[Place],
        *,
        overlaps: bool,
    ) -> None:
        addresses = (ctypes.c_void_p * len(arguments))(*(_address(place) for place in arguments))
        pointers = (ctypes.c_void_p * len(arguments))(
            *(ctypes.addressof(addresses) + at * 8 for at in range(len(arguments)))
        )
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = kernel.num_threads, 1, 1
        config.sharedMemBytes = kernel.shared_bytes
        config.hStream = self._stream.cuda_stream
        if overlaps:
            attribute = driver.CUlaunchAttribute()
            attribute.id = (
                driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            )
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs = [attribute]
            config.numAttrs = 1
        _checked(
            driver.cuLaunchKernelEx(config, kernel.handle, ctypes.addressof(pointers), 0),
            kernel.name,
        )

    def multiply(self, product: Product) -> None:
        with torch.cuda.stream(self._stream):
            self._products.multiply(
                _matrix(product.x),
                _matrix(product.weight),
                _matrix(product.out),
                scales=self._scales(product),
                residual=None if product.residual is None else _matrix(product.residual),
                stream=self._stream.cuda_stream,
            )
            if product.bias is not None:
                _tensor(product.out).add_(_vector(product.bias, product.out.columns))

    def _scales(self, product: Product) -> ScalesAt | None:
        if product.input_scale is None or product.weight_scale is None:
            return None
        by_weight = _address(product.weight_scale)
        if product.uniform_scale:
            return ScalesAt(_address(product.input_scale), by_weight, of_rows=False)
        by_row = self._row_scale(product.input_scale, product.x.rows)
        return ScalesAt(by_row.data_ptr(), by_weight, of_rows=True)

    def _row_scale(self, scale: Place, rows: int) -> torch.Tensor:
        """A scalar scale once a row, as cuBLASLt takes it beside one a column.

        Kept, so that steps do not spread it out again; graphs hold on to those they were captured
        with, so none is ever freed.
        """
        kept = self._row_scales.setdefault(_address(scale), [])
        if not kept or len(kept[-1]) < rows:
            kept.append(_vector(scale, 1).expand(_power_of_two(rows)).contiguous())
        return kept[-1]

    def all_reduce(self, source: Place, target: Place, num_elements: int, dtype: str) -> None:
        assert self._communicator is not None, "a device without a seat has nobody to meet"
        addresses = _address(source), _address(target)
        self._communicator.all_reduce(*addresses, num_elements, dtype, self._stream.cuda_stream)

    def all_gather(self, source: Place, target: Place, num_bytes: int) -> None:
        assert self._communicator is not None, "a device without a seat has nobody to meet"
        addresses = _address(source), _address(target)
        self._communicator.all_gather(*addresses, num_bytes, self._stream.cuda_stream)

    def capture(self, work: Callable[[], None]) -> Graph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            # Thread-local: another thread may look at events meanwhile, as that of a rank's steps
            # does. Not `torch.cuda.graph`, which waits for the device and collects garbage first.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        return _TorchGraph(graph, self._stream)

    def send(self, data: Bytes, target: Place) -> None:
        assert isinstance(target.memory, TorchMemory)
        stage, event = self._slot(len(data))
        stage.numpy()[: len(data)] = data
        with torch.cuda.stream(self._stream):
            part = target.memory.tensor[target.offset : target.offset + len(data)]
            part.copy_(stage[: len(data)], non_blocking=True)
            event.record(self._stream)

    def _slot(self, num_bytes: int) -> tuple[torch.Tensor, torch.cuda.Event]:
        """Pinned memory whose last copy is over."""
        self._next_slot = (self._next_slot + 1) % _SEND_SLOTS
        stage, event = self._slots[self._next_slot]
        self.await_event(event)
        if len(stage) < num_bytes:
            stage = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
            self._pinned.append(stage)
            self._slots[self._next_slot] = (stage, event)
        return stage, event

    def fetch(self, source: Place, num_bytes: int) -> "_TorchDownload":
        assert isinstance(source.memory, TorchMemory)
        target, event = self._landing(num_bytes)
        with torch.cuda.stream(self._stream):
            part = source.memory.tensor[source.offset : source.offset + num_bytes]
            target[:num_bytes].copy_(part, non_blocking=True)
            event.record(self._stream)
        return _TorchDownload(self, target, event, num_bytes)

    def _landing(self, num_bytes: int) -> tuple[torch.Tensor, torch.cuda.Event]:
        """Pinned memory that no download waits in.

        Kept for good, as all pinned memory here: torch records an event when it is freed, and one
        that is recorded while a graph is captured fails when it is asked for.
        """
        for at, (target, _) in enumerate(self._landings):
            if len(target) >= num_bytes:
                return self._landings.pop(at)
        self._pinned.append(torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True))
        return self._pinned[-1], _event()

    def take_landing(self, target: torch.Tensor, event: torch.cuda.Event) -> None:
        """Memory whose download has been read, for the next one."""
        self._landings.append((target, event))

    def copy(self, source: Place, target: Place, num_bytes: int) -> None:
        assert isinstance(source.memory, TorchMemory) and isinstance(target.memory, TorchMemory)
        with torch.cuda.stream(self._stream):
            target.memory.tensor[target.offset : target.offset + num_bytes].copy_(
                source.memory.tensor[source.offset : source.offset + num_bytes]
            )

    def wait(self) -> None:
        self._stream.synchronize()

    def await_event(self, event: torch.cuda.Event) -> None:
        """Block until the work before an event is done.

        Raises:
            EnvironmentFault: the GPU failed, or was abandoned.
        """
        try:
            if self._communicator is None:
                event.synchronize()
                return
            while not event.query():  # type: ignore[no-untyped-call]
                if self._abandoned.is_set():
                    raise EnvironmentFault("the GPU was abandoned")
                time.sleep(_POLL_S)
        except torch.AcceleratorError as error:
            problem = f"the GPU failed: {str(error).splitlines()[0]}"
            raise EnvironmentFault(problem, remedy=_RESTART) from error

    def abandon(self) -> None:
        """NCCL's abort lets go of kernels that wait, but may itself wait for the GPU; and so may
        CUDA, when the process ends."""
        self._abandoned.set()
        if self._communicator is not None:
            threading.Thread(target=self._communicator.abort, daemon=True).start()
        atexit.register(signal.alarm, _EXIT_S)

    def close(self) -> None:
        self.wait()
        if self._communicator is not None:
            self._communicator.abort()
        for module in self._modules:
            driver.cuModuleUnload(module)
        self._modules.clear()
        self._products.close()
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class _TorchGraph:
    graph: torch.cuda.CUDAGraph
    stream: torch.cuda.Stream

    def replay(self) -> None:
        with torch.cuda.stream(self.stream):
            self.graph.replay()


class _TorchDownload:
    """A copy into a landing, which is given back once it has been read."""

    def __init__(
        self, device: TorchDevice, target: torch.Tensor, event: torch.cuda.Event, num_bytes: int
    ) -> None:
        self._device = device
        self._landing = (target, event)
        self._num_bytes = num_bytes
        self._result: Bytes | None = None

    def wait(self) -> Bytes:
        if self._result is None:
            target, event = self._landing
            self._device.await_event(event)
            self._result = target.numpy()[: self._num_bytes].copy()
            self._device.take_landing(target, event)
        return self._result


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def _address(place: Place) -> int:
    assert isinstance(place.memory, TorchMemory)
    return place.memory.tensor.data_ptr() + place.offset


def _matrix(operand: Operand) -> MatrixAt:
    return MatrixAt(
        address=_address(operand.place),
        dtype=operand.dtype,
        rows=operand.rows,
        columns=operand.columns,
        stride=operand.stride,
    )


def _tensor(operand: Operand) -> torch.Tensor:
    assert isinstance(operand.place.memory, TorchMemory)
    dtype = _TORCH[operand.dtype]
    skipped = operand.place.offset
    length = ((operand.rows - 1) * operand.stride + operand.columns) * dtype.itemsize
    flat = operand.place.memory.tensor[skipped : skipped + length].view(dtype)
    return flat.as_strided((operand.rows, operand.columns), (operand.stride, 1))


def _vector(place: Place, length: int) -> torch.Tensor:
    assert isinstance(place.memory, TorchMemory)
    return place.memory.tensor[place.offset : place.offset + 4 * length].view(torch.float32)


def _checked(answer: tuple[Any, ...], what: str) -> Any:
    """The value of a driver call, or an EnvironmentFault."""
    status, *values = answer
    if status != driver.CUresult.CUDA_SUCCESS:
        raise EnvironmentFault(
            f"{status.name}", field=what, remedy="Check the driver with `trtc doctor`"
        )
    return values[0] if values else None
