"""Take a GpuDevice through its life over tests/support/libcuda.c, with a stand-in for cuBLASLt.

    LD_LIBRARY_PATH=<that library> python -m tests.cuda.device_life

The real cuda-bindings run in between. Prints one JSON document.
"""

import ctypes
import json
import sys
import threading
from typing import Any
from unittest.mock import patch

import numpy as np

from trtc.protos.errors import EnvironmentFault
from trtc.protos.launch_plan import TILE_MAP_BYTES
from trtc.runtime.device.cuda_driver import CudaDriverDevice
from trtc.runtime.device.driver_api import DriverApi
from trtc.runtime.executors.cuda import gpu_device
from trtc.runtime.executors.cuda.device import HostArray, Operand, Place, Product, Seat, Span, Tiles
from trtc.runtime.executors.cuda.gpu_device import GpuDevice
from trtc.runtime.executors.cuda.gpu_memory import address

CUBIN = b"\x7fELF and more"
FLOATS = 64


class Library:
    """Offers one way to do any product, and writes down what it was told."""

    def __init__(self) -> None:
        self.described: dict[int, int] = {}
        self.products = 0

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            if name == "cublasLtMatmulDescSetAttribute":
                self.described[arguments[1]] = arguments[2]._obj.value
            if name == "cublasLtMatmulAlgoGetHeuristic":
                arguments[-1]._obj.value = 1
            self.products += name == "cublasLtMatmul"
            return 0

        return call


def floats_at(number: int, length: int) -> list[float]:
    return list((ctypes.c_float * length).from_address(number))


def bits_at(number: int, length: int) -> list[int]:
    return list((ctypes.c_uint16 * length).from_address(number))


def in_another_thread(work: Any) -> list[Any]:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found


def graphs_of_a_rank_that_ends(stub: ctypes.CDLL) -> list[int]:
    """How many there are before `close`, and when its membership ends."""
    found = []

    class Membership:
        def __init__(self, seat: Seat) -> None:
            pass

        def abort(self) -> None:
            found.append(stub.stub_graphs())

    with (
        patch.object(gpu_device, "load_vendor_library", lambda name: Library()),
        patch.object(gpu_device, "NcclCommunicator", Membership),
    ):
        device = GpuDevice(CudaDriverDevice(DriverApi("cuda")), Seat(0, 2, b""))
    memory = device.allocate(8)
    device.capture(lambda: device.copy(Place(memory, 0), Place(memory, 4), 4))
    found.append(stub.stub_graphs())
    device.close()
    return found


def main() -> None:
    stub, library = ctypes.CDLL("libcuda.so.1"), Library()
    with patch.object(gpu_device, "load_vendor_library", lambda name: library):
        device = GpuDevice(CudaDriverDevice(DriverApi("cuda")))
    document: dict[str, Any] = {}

    def floats(memory: Any) -> list[float]:
        data = device.fetch(Place(memory, 0), 4 * FLOATS).wait()
        return [float(one) for one in data.view(np.float32)[:3]]

    x = device.upload(HostArray(np.arange(FLOATS, dtype=np.float32).view(np.uint8)))
    y = device.allocate(4 * FLOATS)
    a = device.upload(HostArray(np.array([-3], np.int32).view(np.uint8)))
    document["uploaded"], document["allocated"] = floats(x), floats(y)

    large = np.random.default_rng(0).integers(0, 256, 5 << 20, np.uint8)
    with patch("trtc.runtime.executors.cuda.gpu_transfers._STAGE_BYTES", 1 << 20):
        memory = device.upload(HostArray(large))
    fetched = device.fetch(Place(memory, 0), len(large)).wait()
    document["staged"] = bool((fetched == large).all())

    kernel = device.load(CUBIN, "axpy", 16, 16)
    arguments = [Place(y, 0), Place(x, 0), Place(a, 0)]

    def work() -> None:
        device.launch(kernel, (2, 1, 2), arguments, overlaps=True)

    work()
    document["once"], document["overlapping"] = floats(y), stub.stub_overlapping()
    graph = device.capture(work)
    document["captured"] = floats(y)

    def replayed() -> list[float]:
        graph.replay()
        return floats(y)

    document["from_another_thread"] = in_another_thread(replayed)
    before = stub.stub_graphs()
    graph.drop()
    document["dropped"] = before - stub.stub_graphs()
    device.copy(Place(y, 4), Place(x, 0), 4)
    document["copied"] = floats(x)

    downloads = [device.fetch(Place(x, 0), 4 * FLOATS) for _ in range(3)]
    device.send(np.full(4 * FLOATS, 0xFF, np.uint8), Place(x, 0))
    device.fetch(Place(x, 0), 4 * FLOATS).wait()
    device.send_early(np.full(4 * FLOATS, 0x40, np.uint8), Place(x, 0))
    document["sent_early"] = floats(x)
    document["kept"] = len({one.wait().tobytes() for one in downloads})

    spans = [Span(Place(memory, 7), 1000), Span(Place(memory, 5000), 3), Span(Place(x, 0), 64)]
    pattern = large[: 1000 + 3 + 64]
    with patch("trtc.runtime.executors.cuda.gpu_transfers._STAGE_BYTES", 100):
        device.scatter(pattern, spans)
    device.scatter(large[:3], [Span(Place(memory, 5000), 3)])
    gathered = device.gather(spans)
    device.send(np.zeros(64, np.uint8), Place(x, 0))
    wanted = np.concatenate([pattern[:1000], large[:3], pattern[1003:]])
    document["gathered"] = bool((gathered.wait() == wanted).all())
    around = device.fetch(Place(memory, 0), len(large)).wait()
    document["beside"] = bool(
        (around[1007:5000] == large[1007:5000]).all() and (around[:7] == large[:7]).all()
    )
    device.scatter(
        np.arange(FLOATS, dtype=np.float32).view(np.uint8), [Span(Place(x, 0), 4 * FLOATS)]
    )

    matrix = Operand(Place(x, 0), "f8e4m3", 3, 16, 16)
    scale = device.upload(HostArray(np.array([0.25], np.float32).view(np.uint8)))
    values = np.array([1, 1 + 2**-8, 1 + 3 * 2**-8, -2.7], np.float32)
    bias = device.upload(HostArray(values.view(np.uint8)))
    product = Product(
        x=matrix,
        weight=Operand(Place(x, 0), "f8e4m3", 4, 16, 16),
        out=Operand(Place(y, 0), "bf16", 3, 4, 4),
        input_scale=Place(scale, 0),
        weight_scale=Place(x, 0),
        uniform_scale=False,
        bias=Place(bias, 0),
    )

    device.capture(lambda: device.multiply(product))
    document["scales"] = floats_at(library.described[18], 4)
    document["bias"] = bits_at(library.described[8], 4)
    made = library.described[18], library.described[8]
    device.multiply(product)
    document["made_once"] = made == (library.described[18], library.described[8])
    document["products"] = library.products

    tiles = Tiles(Place(x, 16), sizes=(64, 3), strides=(128,), box=(64, 2))
    maps = device.map_tiles([tiles, tiles])
    content = device.fetch(Place(maps, TILE_MAP_BYTES), TILE_MAP_BYTES).wait().view(np.uint64)
    rank, begin, *others = (int(one) for one in content[:7])
    document["map"] = [rank, begin - address(Place(x, 0)), *others]

    try:
        device.allocate(1 << 30)
    except EnvironmentFault as error:
        document["out_of_memory"] = str(error)
    document["alive"] = stub.stub_alive()
    device.close()
    document["graphs_of_a_rank_that_ends"] = graphs_of_a_rank_that_ends(stub)
    document["alive_after_close"] = stub.stub_alive()
    sys.stdout.write(json.dumps(document))


if __name__ == "__main__":
    main()
