"""A GPU by the driver API, cuBLASLt and NCCL."""

import atexit
import ctypes
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from trtc.plugins.gpu.arch import DEFAULT_SHARED_BYTES
from trtc.runtime.device.cuda_driver import CudaDriverDevice
from trtc.runtime.executors.cuda.cublaslt import BiasAt, CublasLt, MatrixAt, ScalesAt
from trtc.runtime.executors.cuda.device import (
    Bytes,
    Graph,
    HostArray,
    HostBytes,
    Kernel,
    Operand,
    Place,
    Product,
    Seat,
    Span,
    Tiles,
)
from trtc.runtime.executors.cuda.gpu_memory import GpuMemory, address
from trtc.runtime.executors.cuda.gpu_transfers import EventWaiter, GpuDownload, GpuTransfers
from trtc.runtime.executors.cuda.nccl import NcclCommunicator
from trtc.runtime.executors.cuda.product_vectors import ProductVectors
from trtc.runtime.executors.cuda.tile_maps import tile_map
from trtc.runtime.executors.cuda.vendor_library import load_vendor_library

"""More needs the function's limit raised."""
_WORKSPACE_BYTES = 32 << 20
"""Workspace of cuBLASLt, as recommended for this SM."""
_EXIT_S = 5
"""Seconds for CUDA's exit handlers, which may hang if the GPU waits for a rank that has ended."""


class GpuDevice:
    """A GPU of this process (implements ProgramDevice)."""

    def __init__(self, gpu: CudaDriverDevice, seat: Seat | None = None) -> None:
        """
        Args:
            gpu: owned by this device from now on; `close` closes it.
            seat: rank of several; blocks until all ranks have connected. None: a single GPU.

        Raises:
            EnvironmentFault: a library is missing, or does not support the GPU.
        """
        self._gpu = gpu
        self._waiter = EventWaiter(gpu, is_rank=seat is not None)
        self._transfers = GpuTransfers(gpu, self._waiter)
        self._vectors = ProductVectors(gpu)
        self._products = CublasLt(
            load_vendor_library("cublasLt"), gpu.allocate(_WORKSPACE_BYTES), _WORKSPACE_BYTES
        )
        self._communicator = None if seat is None else NcclCommunicator(seat)

    def allocate(self, num_bytes: int) -> GpuMemory:
        memory = GpuMemory(self._gpu.allocate(num_bytes), num_bytes)
        self._gpu.zero(memory.address, num_bytes)
        return memory

    def upload(self, data: HostBytes) -> GpuMemory:
        memory = GpuMemory(self._gpu.allocate(data.num_bytes), data.num_bytes)
        self._transfers.fill(memory.address, data)
        return memory

    def map_tiles(self, tiles: Sequence[Tiles]) -> GpuMemory:
        maps = b"".join(tile_map(self._gpu, one) for one in tiles)
        return self.upload(HostArray(np.frombuffer(maps, np.uint8)))

    def load(self, cubin: bytes, entry: str, num_threads: int, shared_bytes: int) -> Kernel:
        function = self._gpu.load_kernel(cubin, entry)
        if shared_bytes > DEFAULT_SHARED_BYTES:
            attributes = self._gpu.driver.CUfunction_attribute
            attribute = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._gpu.call("cuFuncSetAttribute", function, attribute, shared_bytes)
        return Kernel(function, entry, num_threads, shared_bytes)

    def launch(
        self,
        kernel: Kernel,
        grid: tuple[int, int, int],
        arguments: Sequence[Place],
        *,
        overlaps: bool,
    ) -> None:
        driver = self._gpu.driver
        addresses = (ctypes.c_void_p * len(arguments))(*(address(place) for place in arguments))
        pointers = (ctypes.c_void_p * len(arguments))(
            *(ctypes.addressof(addresses) + at * 8 for at in range(len(arguments)))
        )
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = kernel.num_threads, 1, 1
        config.sharedMemBytes = kernel.shared_bytes
        config.hStream = self._gpu.stream
        if overlaps:
            attribute = driver.CUlaunchAttribute()
            attribute.id = (
                driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            )
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs = [attribute]
            config.numAttrs = 1
        self._gpu.call("cuLaunchKernelEx", config, kernel.handle, ctypes.addressof(pointers), 0)

    def multiply(self, product: Product) -> None:
        self._gpu.make_current()
        self._products.multiply(
            _matrix_at(product.x),
            _matrix_at(product.weight),
            _matrix_at(product.out),
            scales=self._scales(product),
            bias=self._bias(product),
            residual=None if product.residual is None else _matrix_at(product.residual),
            stream=self._gpu.stream,
        )

    def _scales(self, product: Product) -> ScalesAt | None:
        if product.row_scale is not None and product.weight_scale is not None:
            by_row, by_column = address(product.row_scale), address(product.weight_scale)
            return ScalesAt(by_row, by_column, of_rows=True)
        if product.input_scale is None or product.weight_scale is None:
            return None
        of_x, of_weight = address(product.input_scale), address(product.weight_scale)
        if product.uniform_scale:
            return ScalesAt(of_x, of_weight, of_rows=False)
        of_rows = self._vectors.row_scales(of_x, product.x.rows)
        return ScalesAt(of_rows, of_weight, of_rows=True)

    def _bias(self, product: Product) -> BiasAt | None:
        if product.bias is None:
            return None
        dtype = "bf16" if product.x.dtype == "f8e4m3" else product.out.dtype
        rounded = self._vectors.bias(address(product.bias), product.out.columns, dtype)
        return BiasAt(rounded, dtype)

    def all_reduce(self, source: Place, target: Place, num_elements: int, dtype: str) -> None:
        assert self._communicator is not None, "the device of one rank has no communicator"
        self._gpu.make_current()
        addresses = address(source), address(target)
        self._communicator.all_reduce(*addresses, num_elements, dtype, self._gpu.stream)

    def all_gather(self, source: Place, target: Place, num_bytes: int) -> None:
        assert self._communicator is not None, "the device of one rank has no communicator"
        self._gpu.make_current()
        addresses = address(source), address(target)
        self._communicator.all_gather(*addresses, num_bytes, self._gpu.stream)

    def capture(self, work: Callable[[], None]) -> Graph:
        return _GpuGraph(self._gpu, self._gpu.record(work))

    def send(self, data: Bytes, target: Place) -> None:
        self._transfers.send(data, target)

    def send_early(self, data: Bytes, target: Place) -> None:
        self._transfers.send_early(data, target)

    def fetch(self, source: Place, num_bytes: int) -> GpuDownload:
        return self._transfers.fetch(source, num_bytes)

    def scatter(self, data: Bytes, targets: Sequence[Span]) -> None:
        self._transfers.scatter(data, targets)

    def gather(self, sources: Sequence[Span]) -> GpuDownload:
        return self._transfers.gather(sources)

    def copy(self, source: Place, target: Place, num_bytes: int) -> None:
        self._gpu.copy(address(target), address(source), num_bytes)

    def wait(self) -> None:
        self._gpu.synchronize()

    def abandon(self) -> None:
        """Abort NCCL, which releases waiting kernels. The abort, and CUDA at process exit, may
        themselves wait for the GPU."""
        self._waiter.abandon()
        if self._communicator is not None:
            threading.Thread(target=self._communicator.abort, daemon=True).start()
        atexit.register(signal.alarm, _EXIT_S)

    def close(self) -> None:
        self.wait()
        self._gpu.drop_graphs()  # NCCL waits for graphs that refer to its communicator
        if self._communicator is not None:
            self._communicator.abort()
        self._products.close()
        self._vectors.close()
        self._gpu.close()


@dataclass(frozen=True)
class _GpuGraph:
    gpu: CudaDriverDevice
    handle: int

    def replay(self) -> None:
        self.gpu.replay(self.handle)

    def drop(self) -> None:
        self.gpu.drop_graph(self.handle)


def _matrix_at(operand: Operand) -> MatrixAt:
    return MatrixAt(
        address=address(operand.place),
        dtype=operand.dtype,
        rows=operand.rows,
        columns=operand.columns,
        stride=operand.stride,
    )
