"""Take runtime/device/cuda_driver.py through its life over tests/support/libcuda.c.

    LD_LIBRARY_PATH=<that library> python -m tests.tensorrt.driver_life

The real cuda-bindings run in between. Prints one JSON document.
"""

import ctypes
import json
import sys
from typing import Any

import numpy as np

from trtc.plugins.gpu.probe import device_sm
from trtc.protos.errors import TrtcError
from trtc.runtime.device.base import DriverKernel
from trtc.runtime.device.cuda_driver import CudaDriverDevice
from trtc.runtime.device.driver_api import DriverApi

CUBIN = b"\x7fELF and more"
FLOATS = 64


def error_of(function: Any, *arguments: Any) -> str:
    try:
        function(*arguments)
    except TrtcError as error:
        return str(error)
    return ""


def main() -> None:
    stub = ctypes.CDLL("libcuda.so.1")
    api = DriverApi("tensorrt")
    device = CudaDriverDevice(api)
    free = device.free_bytes()
    x, y = device.allocate(4 * FLOATS), device.allocate(4 * FLOATS)
    taken = free - device.free_bytes()
    host = device.host_buffer(4 * FLOATS)
    values = host.view(np.float32)
    values[:] = np.arange(FLOATS)
    device.upload(x, host)
    device.zero(y, 4 * FLOATS)
    kernel = DriverKernel(device.load_kernel(CUBIN, "axpy"), num_threads=16, shared_bytes=16)

    def work() -> None:
        device.launch(kernel, (2, 2), [y, x, np.int32(-3)])

    def bad_work() -> None:
        device.load_kernel(b"text", "axpy")

    def read(address: int) -> list[float]:
        device.download(host, address)
        device.synchronize()
        return [float(one) for one in values[:3]]

    work()
    once = read(y)
    graph = device.capture(work)
    assert graph is not None
    captured = read(y)
    device.replay(graph)
    device.replay(graph)
    replayed = read(y)
    device.copy(x, y, 8)
    copied = read(x)
    refused = device.capture(lambda: device.upload(x, host))
    failing = device.capture(bad_work)
    second = device.capture(work)
    assert second is not None
    device.drop_graph(second)
    event = device.event()
    before_set = device.has_come(event)
    stub.stub_delay(2)
    device.set_event(event)
    asked = [device.has_come(event) for _ in range(4)]
    device.set_event(event)
    device.await_event(event)
    document = {
        "sm": device_sm(),
        "stream": device.stream,
        "aligned": x % 256 == y % 256 == 0,
        "taken": taken,
        "once": once,
        "captured": captured,
        "replayed": replayed,
        "copied": copied,
        "refused": [refused, failing],
        "come": [before_set, *asked, device.has_come(event)],
        "out_of_memory": error_of(device.allocate, 1 << 30),
        "no_image": error_of(device.load_kernel, b"text", "axpy"),
        "no_entry": error_of(device.load_kernel, CUBIN, "other"),
        "no_device": error_of(CudaDriverDevice, api, 1),
        "alive": stub.stub_alive(),
    }
    device.close()
    device.close()
    document["alive_after_close"] = stub.stub_alive()
    document["after_close"] = [error_of(device.synchronize), error_of(device.make_current)]
    sys.stdout.write(json.dumps(document))


if __name__ == "__main__":
    main()
