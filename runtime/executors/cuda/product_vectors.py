"""Converts an engine's scales and biases to the forms that cuBLASLt requires."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtc.runtime.device.cuda_driver import CudaDriverDevice


class ProductVectors:
    """Vectors, made on first use and kept, because captured graphs refer to them."""

    def __init__(self, gpu: CudaDriverDevice) -> None:
        self._gpu = gpu
        flags = gpu.driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        self._stream = gpu.call("cuStreamCreate", flags.value)
        """Separate from the stream of the steps, which may be capturing."""
        self._row_scales: dict[int, tuple[int, int]] = {}
        self._biases: dict[tuple[int, str], int] = {}

    def row_scales(self, scale: int, rows: int) -> int:
        """Address of a scalar scale repeated for each row: cuBLASLt takes scales of rows and of
        columns together.

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
        """Address of a vector made from f32 values on the device, which must be constant."""
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
        """Context manager that allows this thread to allocate and wait during a capture."""
        relaxed = self._gpu.driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        mode = self._gpu.call("cuThreadExchangeStreamCaptureMode", relaxed)
        try:
            yield
        finally:
            self._gpu.call("cuThreadExchangeStreamCaptureMode", mode)


def round_to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Bits of the nearest bf16, ties to even; for finite values."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
