"""A launch plan on a device: code loaded, memory allocated, addresses resolved."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np

from trtc.protos.dtypes import DTYPES
from trtc.protos.kv import CacheLayout
from trtc.protos.launch_plan import (
    TILE_MAP_BYTES,
    Address,
    CallLaunches,
    CallVariant,
    CollectiveCall,
    KernelCall,
    LaunchPlan,
    Matrix,
    ProductCall,
    TacticTable,
    TileMap,
)
from trtc.runtime.executors.cuda.buckets import Bucket, Tactics, grid_of
from trtc.runtime.executors.cuda.device import (
    Bytes,
    HostBytes,
    Memory,
    Operand,
    Place,
    Product,
    ProgramDevice,
    Tiles,
)

_PIECE_BYTES = 16 << 20
"""Bytes of weights per copy to the host, in one page-locked buffer."""


@dataclass(frozen=True)
class CudaEngineFiles:
    """Verified files of an engine."""

    engine: Path
    launches: LaunchPlan
    weights: HostBytes
    """Data section of weights.safetensors, or dummy weights."""
    tactics: TacticTable | None = None
    """The result of `trtc tune`; None: not tuned."""


class Program:
    """An engine's code, weights and buffers on the device."""

    def __init__(
        self,
        files: CudaEngineFiles,
        device: ProgramDevice,
        *,
        kv: CacheLayout,
        vocab_size: int,
        num_pages: int,
    ) -> None:
        """Load code and weights and allocate what a step needs.

        Raises:
            EngineCorruptError: the weights are no longer readable.
            EnvironmentFault: the GPU has too little memory, or its driver refuses the code.
        """
        launches = files.launches
        self.device = device
        self.calls = launches.calls
        self._tactics = Tactics(files.tactics)
        self._step = launches.step
        sizes = (num_pages * size for size in kv.region_bytes)
        self.regions = tuple(accumulate(sizes, initial=0))[:-1]
        """Offset of each region in the pool."""
        self._kernels = tuple(
            device.load(
                (files.engine / code.file).read_bytes(),
                code.entry,
                code.num_threads,
                code.shared_bytes,
            )
            for code in launches.kernels
        )
        self.spaces: dict[str, Memory] = {
            "weights": device.upload(files.weights),
            "arena": device.allocate(launches.arena_bytes),
            "scratch": device.allocate(max(1, launches.scratch_bytes)),
            "pool": device.allocate(num_pages * kv.page_bytes),
            "step": device.allocate(4 * launches.step.num_elements),
            "logits": device.allocate(4 * launches.step.max_rows * vocab_size),
            "sampling": device.allocate(launches.sampling.bytes),
        }
        self._maps = self._make_maps(launches.tile_maps())

    def run(self, bucket: Bucket, tactics: Tactics | None = None) -> None:
        """Enqueue a whole step with the engine's tactics, or with others."""
        chosen = tactics or self._tactics
        for call in self.calls:
            self.run_call(call, chosen.pick(call, bucket), bucket)

    def run_call(self, call: CallLaunches, variant: CallVariant, bucket: Bucket) -> None:
        """Enqueue one variant of a call."""
        for work in variant.work:
            if isinstance(work, KernelCall):
                self.launch(work, bucket)
            elif isinstance(work, ProductCall):
                self.device.multiply(self._product(work, bucket.extent(call.rows)))
            else:
                self._collect(work, bucket.extent(call.rows))

    def launch(self, work: KernelCall, bucket: Bucket) -> None:
        """Enqueue one kernel, unless its grid is empty in the bucket."""
        if bucket.splits < work.least_splits:
            return
        self.device.launch(
            self._kernels[work.kernel],
            grid_of(work.grid, bucket),
            [
                *(self.place(address) for address in work.arguments),
                *(self._maps[one] for one in work.maps),
            ],
            overlaps=work.overlaps,
        )

    def place(self, address: Address) -> Place:
        offset = address.offset
        if address.space == "step":
            offset += 4 * self._step.offsets[address.name]
        elif address.space == "pool":
            offset += self.regions[address.index]
        return Place(self.spaces[address.space], offset)

    def weights_on_host(self) -> Bytes:
        """A copy of the weights, which are constant."""
        memory = self.spaces["weights"]
        copy = np.empty(memory.num_bytes, np.uint8)
        for begin in range(0, memory.num_bytes, _PIECE_BYTES):
            piece = copy[begin : begin + _PIECE_BYTES]
            piece[:] = self.device.fetch(Place(memory, begin), len(piece)).wait()
        return copy

    def close(self) -> None:
        self._maps.clear()
        self.spaces.clear()
        self.device.close()

    def _make_maps(self, maps: Sequence[TileMap]) -> dict[TileMap, Place]:
        if not maps:
            return {}
        memory = self.device.map_tiles(
            [Tiles(self.place(one.address), one.sizes, one.strides, one.box) for one in maps]
        )
        return {one: Place(memory, at * TILE_MAP_BYTES) for at, one in enumerate(maps)}

    def _collect(self, work: CollectiveCall, rows: int) -> None:
        source, target = self.place(work.source), self.place(work.target)
        num_elements = rows * work.columns
        if work.kind == "all_reduce":
            self.device.all_reduce(source, target, num_elements, work.dtype)
        else:
            self.device.all_gather(source, target, DTYPES[work.dtype].num_bytes(num_elements))

    def _product(self, work: ProductCall, rows: int) -> Product:
        def operand(matrix: Matrix) -> Operand:
            return Operand(
                place=self.place(matrix.address),
                dtype=matrix.dtype,
                rows=matrix.rows or rows,
                columns=matrix.columns,
                stride=matrix.stride,
            )

        def place(address: Address | None) -> Place | None:
            return None if address is None else self.place(address)

        return Product(
            x=operand(work.x),
            weight=operand(work.weight),
            out=operand(work.out),
            input_scale=place(work.input_scale),
            weight_scale=place(work.weight_scale),
            uniform_scale=work.uniform_scale,
            bias=place(work.bias),
            residual=None if work.residual is None else operand(work.residual),
            row_scale=place(work.row_scale),
        )
