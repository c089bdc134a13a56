"""Device memory of an engine of plans, by tensors' names in the graph."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate

import numpy as np

from trtc.protos.dtypes import DTYPES
from trtc.protos.kv import CacheLayout, Place
from trtc.protos.manifest import Limits
from trtc.protos.stages import TENSOR_ALIGNMENT, Stages
from trtc.runtime.device.base import Bytes, DriverDevice
from trtc.runtime.executors.tensorrt_step import Shape, StepInputs, input_tensors

Tensors = Mapping[str, tuple[str, Shape]]
"""Name -> element type and shape."""


def step_tensors(stages: Stages, vocab_size: int) -> Tensors:
    """All tensors that a plan may read or write: inputs, pools, buffers and logits."""
    kv = stages.pool
    pools = {place: (place.entry.element, kv.pool_shape(place)) for place in kv.places}
    return {
        **{one.name: ("i32", one.input.shape) for one in input_tensors(len(kv.groups))},
        **{name: pool for place, pool in pools.items() for name in pool_names(place)},
        **{one.name: (one.dtype, (one.rows, one.columns)) for one in stages.buffers},
        "logits": ("f32", ("R", vocab_size)),
    }


def pool_names(place: Place) -> tuple[str, str]:
    """Names of an entry's pool as input and as output, which share memory."""
    return place.name, f"{place.name}_out"


class EngineMemory:
    """All device memory of an engine except its weights and its plans' scratch memory."""

    def __init__(
        self,
        device: DriverDevice,
        stages: Stages,
        limits: Limits,
        vocab_size: int,
        num_pages: int,
    ) -> None:
        """Allocate everything, the pool last, so that an error for lack of memory names the pool.

        Raises:
            EnvironmentFault: too little memory.
        """
        self._device = device
        self._kv = stages.pool
        largest = {
            "T": limits.max_num_tokens,
            "B": limits.max_batch_size,
            "B+1": limits.max_batch_size + 1,
            "P": stages.pool.pages_for(limits.max_seq_len),
            "R": limits.max_batch_size,
        }
        self.inputs = StepInputs(device, largest, max(1, len(stages.pool.groups)))
        arena = device.allocate(stages.arena_bytes)
        logits_bytes = DTYPES["f32"].num_bytes(largest["R"] * vocab_size)
        self.host_logits = device.host_buffer(logits_bytes)
        self.addresses: dict[str, int] = {
            **self.inputs.addresses,
            **{one.name: arena + one.offset for one in stages.buffers},
            **_upload_constants(device, stages.constants),
            "logits": device.allocate(logits_bytes),
        }
        self._pools = _allocate_pools(device, stages.pool, num_pages)
        for place in stages.pool.places:
            self.addresses |= dict.fromkeys(pool_names(place), self._pools[place.region])

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy pages in every region, in the given order."""
        for pool, size in zip(self._pools, self._kv.region_bytes, strict=True):
            for source, target in zip(sources, targets, strict=True):
                self._device.copy(pool + target * size, pool + source * size, size)

    def read_pages(self, pages: Sequence[int]) -> Bytes:
        """[number of pages, bytes of a page in all regions]; waits for the stream."""
        data = np.empty((len(pages), self._kv.page_bytes), np.uint8)
        for row, page in zip(data, pages, strict=True):
            for address, part in self._rows(page):
                self._device.download(self._stage[part], address)
            self._device.synchronize()
            row[:] = self._stage
        return data

    def write_pages(self, pages: Sequence[int], data: Bytes) -> None:
        for row, page in zip(data, pages, strict=True):
            self._stage[:] = row
            for address, part in self._rows(page):
                self._device.upload(address, self._stage[part])
            self._device.synchronize()

    @cached_property
    def _stage(self) -> Bytes:
        """Page-locked memory of one page."""
        return self._device.host_buffer(self._kv.page_bytes)

    def _rows(self, page: int) -> Iterator[tuple[int, slice]]:
        """For each region, the address of a page's row, and its part of the page's bytes."""
        begin = 0
        for pool, size in zip(self._pools, self._kv.region_bytes, strict=True):
            yield pool + page * size, slice(begin, begin + size)
            begin += size


def _upload_constants(device: DriverDevice, constants: Mapping[str, float]) -> dict[str, int]:
    """Upload scalars at aligned addresses (TENSOR_ALIGNMENT), as kernels require."""
    staging = device.host_buffer(max(1, len(constants)) * TENSOR_ALIGNMENT)
    base = device.allocate(staging.nbytes)
    addresses = {}
    for number, (name, value) in enumerate(constants.items()):
        offset = number * TENSOR_ALIGNMENT
        staging[offset : offset + 4] = np.frombuffer(np.float32(value).tobytes(), np.uint8)
        addresses[name] = base + offset
    device.upload(base, staging)
    device.synchronize()
    return addresses


def _allocate_pools(device: DriverDevice, kv: CacheLayout, num_pages: int) -> list[int]:
    """Address of each region, cleared, because GPU memory is not zeroed at allocation."""
    sizes = [
        -(-num_pages * size // TENSOR_ALIGNMENT) * TENSOR_ALIGNMENT for size in kv.region_bytes
    ]
    base = device.allocate(sum(sizes))
    device.zero(base, sum(sizes))
    device.synchronize()
    return [base + begin for begin in accumulate(sizes[:-1], initial=0)]
