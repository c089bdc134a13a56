"""Vectors that products by cuBLASLt take and engines do not hold, made of those that they hold."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtc.runtime.device.cuda_driver import CudaDriverDevice


class ProductVectors:
    """Made when they are first asked for, and kept: graphs hold on to those they were captured
    with."""

    def __init__(self, gpu: CudaDriverDevice) -> None:
        self._gpu = gpu
        flags = gpu.driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        self._stream = gpu.call("cuStreamCreate", flags.value)
        """Beside the stream of the steps, which may be under capture."""
        self._row_scales: dict[int, tuple[int, int]] = {}
        self._biases: dict[tuple[int, str], int] = {}

    def row_scales(self, scale: int, rows: int) -> int:
        """Address of a scalar scale once a row, as cuBLASLt takes it beside one a column.

        Args:
            scale: address of an f32.
        """
        address, length = self._row_scales.get(scale, (0, 0))
        if length < rows:
            length = 1 << (rows - 1).bit_length()
            address = self._made(scale, 1, lambda value: np.full(length, value[0], np.float32))
            self._row_scales[scale] = address, length
        return address

    def bias(self, bias: int, columns: int, dtype: str) -> int:
        """Address of an f32 bias in another type: "f32" or "bf16"."""
        if (bias, dtype) not in self._biases:
            rounded = round_to_bf16 if dtype == "bf16" else np.copy
            self._biases[bias, dtype] = self._made(bias, columns, rounded)
        return self._biases[bias, dtype]

    def close(self) -> None:
        self._gpu.call("cuStreamDestroy", self._stream)

    def _made(
        self,
        source: int,
        length: int,
        make: Callable[[NDArray[np.float32]], NDArray[Any]],
    ) -> int:
        """Address of what is made of f32 values on the device, which nothing writes any more."""
        values = np.empty(length, np.float32)
        with self._outside_capture():
            self._gpu.call(
                "cuMemcpyDtoHAsync", values.ctypes.data, source, values.nbytes, self._stream
            )
            self._gpu.call("cuStreamSynchronize", self._stream)
            made = make(values)
            address = self._gpu.allocate(made.nbytes)
            self._gpu.call(
                "cuMemcpyHtoDAsync", address, made.ctypes.data, made.nbytes, self._stream
            )
            self._gpu.call("cuStreamSynchronize", self._stream)
        return address

    @contextmanager
    def _outside_capture(self) -> Iterator[None]:
        """Allows what this thread may not do while it captures: allocate, and wait."""
        relaxed = self._gpu.driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        mode = self._gpu.call("cuThreadExchangeStreamCaptureMode", relaxed)
        try:
            yield
        finally:
            self._gpu.call("cuThreadExchangeStreamCaptureMode", mode)


def round_to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Bits of the nearest bf16, ties to even; of finite values."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
