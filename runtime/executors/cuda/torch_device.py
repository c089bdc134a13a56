"""A GPU by torch (memory, streams, graphs, cuBLASLt) and the driver API (cubins)."""

import atexit
import ctypes
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from cuda.bindings import driver

from trtc.protos.errors import EnvironmentFault
from trtc.protos.launches import TILE_MAP_BYTES
from trtc.runtime.executors.cuda.cublaslt import CublasLt, MatrixAt, ScalesAt
from trtc.runtime.executors.cuda.device import (
    Bytes,
    Graph,
    Kernel,
    Operand,
    Place,
    Product,
    Seat,
    Tiles,
)
from trtc.runtime.executors.cuda.nccl import NcclCommunicator
from trtc.runtime.executors.cuda.torch_memory import TorchMemory, address, matrix, part, vector
from trtc.runtime.executors.cuda.torch_transfers import EventWaiter, TorchDownload, TorchTransfers

_STATIC_SHARED_BYTES = 48 * 1024
"""More needs the function's limit raised."""
_WORKSPACE_BYTES = 32 << 20
"""For cuBLASLt's products, as much as it likes on this SM."""
_EXIT_S = 5
"""For CUDA's own end of a process whose GPU waits for a rank that is gone."""


class TorchDevice:
    """CUDA device 0 of this process, or that of a rank (implements ProgramDevice)."""

    def __init__(self, seat: Seat | None = None) -> None:
        """Args: seat: of one of several ranks; blocks until all are there."""
        self._device = torch.device("cuda", 0 if seat is None else seat.rank)
        torch.cuda.set_device(self._device)
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._modules: list[Any] = []
        self._pool = torch.cuda.graph_pool_handle()
        self._waiter = EventWaiter(is_rank=seat is not None)
        self._transfers = TorchTransfers(self._stream, self._waiter)
        self._row_scales: dict[int, list[torch.Tensor]] = {}
        self._workspace = self.allocate(_WORKSPACE_BYTES)
        self._products = CublasLt(
            str(torch.version.cuda), self._workspace.tensor.data_ptr(), _WORKSPACE_BYTES
        )
        self._communicator = None if seat is None else NcclCommunicator(seat)

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
        memory = self.allocate(len(data))
        self._transfers.fill(memory, data)
        return memory

    def map_tiles(self, tiles: Sequence[Tiles]) -> TorchMemory:
        return self.upload(np.frombuffer(b"".join(tile_map(one) for one in tiles), np.uint8))

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
        addresses = (ctypes.c_void_p * len(arguments))(*(address(place) for place in arguments))
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
                _matrix_at(product.x),
                _matrix_at(product.weight),
                _matrix_at(product.out),
                scales=self._scales(product),
                residual=None if product.residual is None else _matrix_at(product.residual),
                stream=self._stream.cuda_stream,
            )
            if product.bias is not None:
                matrix(product.out).add_(vector(product.bias, product.out.columns))

    def _scales(self, product: Product) -> ScalesAt | None:
        if product.input_scale is None or product.weight_scale is None:
            return None
        by_weight = address(product.weight_scale)
        if product.uniform_scale:
            return ScalesAt(address(product.input_scale), by_weight, of_rows=False)
        by_row = self._row_scale(product.input_scale, product.x.rows)
        return ScalesAt(by_row.data_ptr(), by_weight, of_rows=True)

    def _row_scale(self, scale: Place, rows: int) -> torch.Tensor:
        """A scalar scale once a row, as cuBLASLt takes it beside one a column.

        Kept, so that steps do not spread it out again; graphs hold on to those they were captured
        with, so none is ever freed.
        """
        kept = self._row_scales.setdefault(address(scale), [])
        if not kept or len(kept[-1]) < rows:
            kept.append(vector(scale, 1).expand(_power_of_two(rows)).contiguous())
        return kept[-1]

    def all_reduce(self, source: Place, target: Place, num_elements: int, dtype: str) -> None:
        assert self._communicator is not None, "a device without a seat has nobody to meet"
        addresses = address(source), address(target)
        self._communicator.all_reduce(*addresses, num_elements, dtype, self._stream.cuda_stream)

    def all_gather(self, source: Place, target: Place, num_bytes: int) -> None:
        assert self._communicator is not None, "a device without a seat has nobody to meet"
        addresses = address(source), address(target)
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
        self._transfers.send(data, target)

    def fetch(self, source: Place, num_bytes: int) -> TorchDownload:
        return self._transfers.fetch(source, num_bytes)

    def copy(self, source: Place, target: Place, num_bytes: int) -> None:
        with torch.cuda.stream(self._stream):
            part(target, num_bytes).copy_(part(source, num_bytes))

    def wait(self) -> None:
        self._stream.synchronize()

    def abandon(self) -> None:
        """NCCL's abort lets go of kernels that wait, but may itself wait for the GPU; and so may
        CUDA, when the process ends."""
        self._waiter.abandon()
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


def tile_map(tiles: Tiles) -> bytes:
    """The tensor map of some tiles.

    Raises:
        EnvironmentFault: the driver makes no such map.
    """
    encoded = _checked(
        driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8,
            len(tiles.sizes),
            address(tiles.place),
            [driver.cuuint64_t(size) for size in tiles.sizes],
            [driver.cuuint64_t(stride) for stride in tiles.strides],
            [driver.cuuint32_t(length) for length in tiles.box],
            [driver.cuuint32_t(1)] * len(tiles.sizes),
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        ),
        "tensor map",
    )
    return ctypes.string_at(encoded.getPtr(), TILE_MAP_BYTES)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _matrix_at(operand: Operand) -> MatrixAt:
    return MatrixAt(
        address=address(operand.place),
        dtype=operand.dtype,
        rows=operand.rows,
        columns=operand.columns,
        stride=operand.stride,
    )


def _checked(answer: tuple[Any, ...], what: str) -> Any:
    """The value of a driver call, or an EnvironmentFault."""
    status, *values = answer
    if status != driver.CUresult.CUDA_SUCCESS:
        raise EnvironmentFault(
            f"{status.name}", field=what, remedy="Check the driver with `trtc doctor`"
        )
    return values[0] if values else None
