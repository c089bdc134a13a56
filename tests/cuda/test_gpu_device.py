"""The device on a GPU: copies there and back, graphs, and products as cuBLASLt does them."""

import gc
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from trtc.runtime.device.cuda_driver import CudaDriverDevice
from trtc.runtime.device.driver_api import DriverApi
from trtc.runtime.executors.cuda.device import HostArray, Operand, Place, Product
from trtc.runtime.executors.cuda.gpu_device import GpuDevice

pytestmark = pytest.mark.gpu

BYTES = 4096
ROWS, COLUMNS, DEPTH = 48, 80, 256
NUMPY = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f8e4m3": ml_dtypes.float8_e4m3fn}


@pytest.fixture(scope="module")
def device():  # type: ignore[no-untyped-def]
    return GpuDevice(CudaDriverDevice(DriverApi("cuda")))


def pattern(seed: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, BYTES, np.uint8)


def test_downloads_keep_their_bytes_when_later_ones_land(device) -> None:  # type: ignore[no-untyped-def]
    memory = device.allocate(BYTES)
    found = []
    for seed in range(8):
        device.send(pattern(seed), Place(memory, 0))
        found.append(device.fetch(Place(memory, 0), BYTES))
    first = [download.wait() for download in found]
    device.send(pattern(99), Place(memory, 0))
    device.fetch(Place(memory, 0), BYTES).wait()
    for seed, (one, download) in enumerate(zip(first, found, strict=True)):
        np.testing.assert_array_equal(one, pattern(seed))
        np.testing.assert_array_equal(download.wait(), pattern(seed))


def test_a_copy_sent_early_overtakes_work_and_not_what_was_sent_before(device) -> None:  # type: ignore[no-untyped-def]
    """What was sent before it to the same place is overwritten; what is asked for after it finds
    its bytes, however long the device is busy in between."""
    source, target, busy = device.allocate(BYTES), device.allocate(BYTES), device.allocate(1 << 28)
    for seed in range(20):
        for _ in range(4):
            device.copy(Place(busy, 0), Place(busy, 1 << 27), 1 << 27)
        device.send(pattern(seed), Place(source, 0))
        for _ in range(4):
            device.copy(Place(busy, 0), Place(busy, 1 << 27), 1 << 27)
        device.send_early(pattern(seed + 1), Place(source, 0))
        device.copy(Place(source, 0), Place(target, 0), BYTES)
        found = device.fetch(Place(target, 0), BYTES)
        np.testing.assert_array_equal(found.wait(), pattern(seed + 1))


def test_garbage_of_steps_may_be_collected_while_a_graph_is_captured(device) -> None:  # type: ignore[no-untyped-def]
    source, target = device.allocate(BYTES), device.allocate(BYTES)
    device.send(pattern(1), Place(source, 0))
    device.wait()
    garbage = [device.fetch(Place(source, 0), BYTES) for _ in range(4)]
    garbage.append(garbage)  # a cycle, so that only the collector frees them

    def work() -> None:
        nonlocal garbage
        garbage = []
        gc.collect()
        device.copy(Place(source, 0), Place(target, 0), BYTES)

    graph = device.capture(work)
    device.send(pattern(2), Place(source, 0))
    graph.replay()
    for _ in range(4):
        np.testing.assert_array_equal(device.fetch(Place(target, 0), BYTES).wait(), pattern(2))


@pytest.mark.parametrize("by_row", [True, False])
@pytest.mark.parametrize("uniform", [True, False])
@pytest.mark.parametrize("has_residual", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("types", [("f32", "f32"), ("bf16", "bf16"), ("f8e4m3", "bf16")])
def test_products_agree_with_sums_in_f64(  # type: ignore[no-untyped-def]
    device, types: tuple[str, str], has_bias: bool, has_residual: bool, uniform: bool, by_row: bool
) -> None:
    dtype, out_dtype = types
    rng = np.random.default_rng()
    x, weight = (
        rng.standard_normal((rows, DEPTH)).astype(NUMPY[dtype]) for rows in (ROWS, COLUMNS)
    )
    residual = rng.standard_normal((ROWS, COLUMNS)).astype(NUMPY[out_dtype])
    bias = rng.standard_normal(COLUMNS).astype(np.float32)
    if by_row and dtype != "f8e4m3":
        pytest.skip("E4M3 alone has scales")
    input_scale = rng.uniform(0.02, 0.03, ROWS if by_row else 1).astype(np.float32)
    weight_scale = rng.uniform(0.5, 2, COLUMNS).astype(np.float32)
    if uniform:
        weight_scale[:] = weight_scale[0]

    def place(array) -> Place:  # type: ignore[no-untyped-def]
        return Place(
            device.upload(HostArray(np.ascontiguousarray(array).reshape(-1).view(np.uint8))), 0
        )

    def operand(array, name: str) -> Operand:  # type: ignore[no-untyped-def]
        rows, columns = array.shape
        return Operand(place(array), name, rows, columns, columns)

    expected = x.astype(np.float64) @ weight.astype(np.float64).T
    scaled = dtype == "f8e4m3"
    if scaled:
        expected *= input_scale.astype(np.float64)[:, None] * weight_scale
    expected += has_residual * residual.astype(np.float64) + has_bias * bias
    product = Product(
        x=operand(x, dtype),
        weight=operand(weight, dtype),
        out=operand(np.full_like(residual, np.nan), out_dtype),
        input_scale=place(input_scale) if scaled and not by_row else None,
        row_scale=place(input_scale) if by_row else None,
        weight_scale=place(weight_scale) if scaled else None,
        uniform_scale=uniform,
        bias=place(bias) if has_bias else None,
        residual=operand(residual, out_dtype) if has_residual else None,
    )
    for graph in (False, True):
        for rows in (ROWS, 16):
            fewer = replace(
                product,
                x=replace(product.x, rows=rows),
                out=replace(product.out, rows=rows),
                residual=replace(product.residual, rows=rows) if product.residual else None,
            )
            if graph:
                device.capture(lambda fewer=fewer: device.multiply(fewer)).replay()
            else:
                device.multiply(fewer)
            data = device.fetch(product.out.place, residual[:rows].nbytes).wait()
            found = data.view(NUMPY[out_dtype]).reshape(rows, COLUMNS).astype(np.float64)
            tolerance = 1e-5 if out_dtype == "f32" else 2.0**-6
            largest = np.abs(expected).max()
            assert np.abs(found - expected[:rows]).max() < tolerance * largest
