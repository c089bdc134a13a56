"""Run lowered kernels on a GPU, compiled for it on the spot; the counterpart of interpret_work."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.support.triton_kernels import Work, launches_of, programs, scratch_of
from trtc.builder.targets.gpu.nvrtc import compile_cuda
from trtc.builder.targets.gpu.triton import compile_kernel
from trtc.plugins.gpu.lowering import SCRATCH, Launch
from trtc.plugins.gpu.probe import device_sm
from trtc.plugins.gpu.sources import CudaSource
from trtc.protos.launch_plan import TILE_MAP_BYTES
from trtc.runtime.device.cuda_driver import CudaDriverDevice
from trtc.runtime.device.driver_api import DriverApi
from trtc.runtime.executors.cuda.device import HostArray, Kernel, Place, ProgramDevice, Tiles
from trtc.runtime.executors.cuda.gpu_device import GpuDevice

Array = NDArray[Any]


@dataclass
class Gpu:
    """A device, and the kernels that it has loaded."""

    device: ProgramDevice
    sm: int
    _loaded: dict[str, Kernel] = field(default_factory=dict)

    @classmethod
    def open(cls) -> "Gpu":
        sm = device_sm()
        assert sm is not None, "no GPU"
        return cls(GpuDevice(CudaDriverDevice(DriverApi("cuda"))), sm)

    def run(self, work: Work) -> dict[str, Array]:
        """Every array after the launches, by argument name."""
        return self._run(work, overlaps=True)

    def run_apart(self, work: Work) -> dict[str, Array]:
        """As `run`, with every launch after the end of the one before."""
        return self._run(work, overlaps=False)

    def _run(self, work: Work, *, overlaps: bool) -> dict[str, Array]:
        scratch = {
            SCRATCH + name: np.full(num_bytes, 0xFF, np.uint8)
            for name, num_bytes in scratch_of(work).items()
        }
        launches = launches_of(work)
        places = self.upload(_as_in_an_engine(work, launches) | scratch)
        for launch in launches:
            tiles = [
                Tiles(places[one.parameter], one.sizes, one.strides, one.box) for one in launch.maps
            ]
            maps = self.device.map_tiles(tiles) if tiles else None
            arguments = [places[name] for name in launch.arguments]
            arguments += [Place(maps, at * TILE_MAP_BYTES) for at in range(len(tiles))]
            self.launch(launch, work.bucket, arguments, overlaps=overlaps)
        return {name: self.fetch(places[name], array) for name, array in work.arrays.items()}

    def upload(self, arrays: Mapping[str, Array]) -> dict[str, Place]:
        return {
            name: Place(
                self.device.upload(
                    HostArray(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
                ),
                0,
            )
            for name, array in arrays.items()
        }

    def fetch(self, place: Place, like: Array) -> Array:
        """What an array of the shape and type of `like` holds there."""
        data = self.device.fetch(place, like.nbytes).wait()
        return data.copy().view(like.dtype).reshape(like.shape)

    def launch(
        self,
        launch: Launch,
        bucket: Mapping[str, int],
        arguments: Sequence[Place],
        *,
        overlaps: bool,
    ) -> None:
        x, y, z = (programs(extent, bucket) for extent in launch.grid)
        if x and y and z:
            kernel = self._kernel(launch)
            self.device.launch(kernel, (x, y, z), arguments, overlaps=overlaps and launch.overlaps)

    def _kernel(self, launch: Launch) -> Kernel:
        key = repr(launch.kernel)
        if key not in self._loaded:
            is_cuda = isinstance(launch.kernel, CudaSource)
            compile_one: Any = compile_cuda if is_cuda else compile_kernel
            compiled = compile_one(launch.kernel, self.sm)
            self._loaded[key] = self.device.load(
                compiled.cubin, compiled.entry, compiled.num_threads, compiled.shared_bytes
            )
        return self._loaded[key]


def _as_in_an_engine(work: Work, launches: Sequence[Any]) -> dict[str, Array]:
    """The arrays; those of a step's tokens of which launches have maps with room for as many tokens
    as the limits allow, since a box may reach as far, and scales of rows for all rows that a launch
    is for, which are copied at once."""
    found = dict(work.arrays)
    if "row_scale" in found:
        scales = found["row_scale"]
        tokens = max(len(scales), work.arguments[0].limits.max_num_tokens)
        poison = np.full((tokens - len(scales), *scales.shape[1:]), np.nan, scales.dtype)
        found["row_scale"] = np.concatenate((scales, poison))
    for launch in launches:
        for one in launch.maps:
            tokens = work.arguments[0].limits.max_num_tokens
            if one.sizes[-1] == tokens and one.parameter in found:
                array = found[one.parameter]
                more = np.full(one.sizes[-1] * one.strides[-1] - array.nbytes, 0xFF, np.uint8)
                held = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
                found[one.parameter] = np.concatenate((held, more))
    return found
