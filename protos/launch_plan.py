"""The launch plan of a CUDA engine: every call of plan.json as kernels and GEMMs.

    plan.json        what is computed, on which buffers
    launches.json    how: cubins, grids that grow with the step's bucket, resolved addresses
    kernels/*.cubin  the code, one file per specialisation

The executor captures the list into CUDA graphs, one per bucket.
"""

import hashlib
from pathlib import Path
from typing import Literal

import msgspec

from trtc.protos.manifest import TACTICS_PREFIX
from trtc.protos.numbers import Count, Index, Size
from trtc.protos.record import Record, read_record

LAUNCHES_FILE = "launches.json"
KERNELS_DIR = "kernels"
TILE_MAP_BYTES = 128
"""Size and alignment of a tensor map on the device."""


Axis = Literal["tokens", "sequences", "rows", "splits", "one"]


class Address(Record, frozen=True):
    """The place of a tensor on the device: `offset` bytes into a space.

    weights, arena, scratch, logits and sampling are one allocation each; `pool` is the KV pool,
    region `index`; `step` is the step input `name` (token_ids, ..., or dims).
    """

    space: Literal["weights", "arena", "scratch", "pool", "step", "logits", "sampling"]
    name: str = ""
    index: Index = 0
    offset: Size = 0


class GridAxis(Record, frozen=True):
    """Programs along an axis: times * (ceil(axis / block) + plus)."""

    axis: Axis = "one"
    block: Count = 1
    times: Count = 1
    plus: Axis | None = None


class KernelCode(Record, frozen=True):
    """A compiled kernel."""

    file: str
    """Cubin, relative to the engine."""
    entry: str
    num_threads: Count
    shared_bytes: Index
    """Dynamic shared memory of a launch; beyond 48 KB the function's limit is raised first."""


class TileMap(Record, frozen=True):
    """A tensor map of TMA (cuTensorMapEncodeTiled), made when the engine is
    opened: bytes in up to five dimensions, copied in tiles into panels that are swizzled by 128."""

    address: Address
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    """Strides in bytes of all dimensions except the first."""
    box: tuple[int, ...]


class KernelCall(Record, frozen=True, tag_field="do", tag="kernel"):
    kernel: Index
    """Index into `LaunchPlan.kernels`."""
    arguments: tuple[Address, ...]
    grid: tuple[GridAxis, GridAxis, GridAxis]
    overlaps: bool
    """Programmatic dependent launch (PDL)."""
    maps: tuple[TileMap, ...] = ()
    """Tensor maps, whose addresses follow the arguments."""
    least_splits: Index = 0
    """Buckets with fewer splits skip the launch, which would do nothing."""


class Matrix(Record, frozen=True):
    """A row-major matrix; `rows` 0: as many as the bucket has."""

    address: Address
    dtype: str
    columns: Count
    stride: Count
    """Elements from one row to the next."""
    rows: Index = 0


class ProductCall(Record, frozen=True, tag_field="do", tag="product"):
    """out = x @ weight.T (* input_scale or row_scale, * weight_scale) (+ residual) (+ bias), by
    cuBLASLt."""

    x: Matrix
    weight: Matrix
    out: Matrix
    input_scale: Address | None
    """f32 scalar."""
    weight_scale: Address | None
    """f32 [rows of the weight]."""
    uniform_scale: bool
    """Whether all of `weight_scale` is one value."""
    bias: Address | None
    """f32 [rows of the weight]."""
    residual: Matrix | None = None
    """Has the type of `out`, and may be `out` itself."""
    row_scale: Address | None = None
    """f32 [rows of x]."""


class CollectiveCall(Record, frozen=True, tag_field="do", tag="collective"):
    """A collective, which all ranks run at the same point of their lists, over a bucket's rows."""

    kind: Literal["all_reduce", "all_gather"]
    source: Address
    target: Address
    """As large as the source; for all_gather as the concatenated sources of all ranks."""
    dtype: str
    columns: Count
    """Elements of a row; rows are contiguous."""


Work = KernelCall | ProductCall | CollectiveCall


class CallVariant(Record, frozen=True):
    """One way to run a call, for buckets of up to `max_rows` rows."""

    kind: Literal["decode", "any"]
    max_rows: Index
    work: tuple[Work, ...]


class CallLaunches(Record, frozen=True):
    """A call of plan.json; the first variant that fits a bucket runs."""

    site: str
    rows: Literal["tokens", "rows"]
    variants: tuple[CallVariant, ...]


class StepBlock(Record, frozen=True):
    """The step's inputs as one int32 block, which is copied to the device at once."""

    offsets: dict[str, Index]
    """Input (`dims` and the names of a graph's inputs) -> its first element; page tables come last,
    those of one sequence side by side."""
    num_elements: Count
    table_width: Count
    """Pages of a row of one group's page table."""
    max_rows: Count
    """Logit rows of one step."""
    num_groups: Count = 1
    """Of the cache layout. A sequence has `slots` and a page table of each."""


class SamplingTensor(Record, frozen=True):
    """A tensor of the sampler that is not part of the step block."""

    offset: Size
    """Bytes into the space `sampling`."""
    rows: Index
    """Most rows."""
    columns: Index


class SamplingPlan(Record, frozen=True):
    """The sampler's stages, by the names of plugins/sampling/tensors.py."""

    stages: dict[str, tuple[KernelCall, ...]]
    tensors: dict[str, SamplingTensor]
    bytes: Size


class LaunchPlan(Record, frozen=True, kw_only=True):
    sm: Count
    split_keys: Count
    """Keys of a split in split-KV attention: the axis `splits` is the longest context over this,
    rounded up, and at most `max_splits`."""
    max_splits: Count
    """Most splits: in longer contexts the splits are longer."""
    kernels: tuple[KernelCode, ...]
    calls: tuple[CallLaunches, ...]
    sampling: SamplingPlan
    step: StepBlock
    arena_bytes: Size
    scratch_bytes: Size
    """Bytes of temporary buffers of the call that needs most."""

    def tile_maps(self) -> tuple[TileMap, ...]:
        """Tensor maps of all kernels, each once."""
        works = (work for call in self.calls for variant in call.variants for work in variant.work)
        kernels = (work for work in works if isinstance(work, KernelCall))
        return tuple(dict.fromkeys(one for kernel in kernels for one in kernel.maps))

    def fixed_bytes(self, vocab_size: int) -> int:
        """Bytes of device memory without weights and pool."""
        logits = 4 * self.step.max_rows * vocab_size
        step = 4 * self.step.num_elements
        maps = TILE_MAP_BYTES * len(self.tile_maps())
        return self.arena_bytes + self.scratch_bytes + step + logits + self.sampling.bytes + maps


class Tactic(Record, frozen=True):
    """The fastest variant of some calls in steps of a number of rows."""

    sites: tuple[str, ...]
    kind: Literal["decode", "mixed"]
    rows: Index
    variant: Index
    """Index into `CallLaunches.variants`."""
    microseconds: float
    """Time of a whole step with the variant."""
    default_microseconds: float
    """Time of the same step with the default: the first variant that fits."""


class TacticTable(Record, frozen=True):
    """The result of `trtc tune` on one GPU."""

    device: str
    tactics: tuple[Tactic, ...]


def tactics_file(content: bytes) -> str:
    """File name of a tactic table, by its content, so that a new table never overwrites one that a
    manifest still lists."""
    return f"{TACTICS_PREFIX}{hashlib.sha256(content).hexdigest()[:12]}.json"


def read_tactics(path: Path) -> TacticTable:
    """Decode a tactic table.

    Raises:
        EngineCorruptError: unreadable, or not one.
    """
    return read_record(path, TacticTable)


def launches_json(launches: LaunchPlan) -> bytes:
    return msgspec.json.encode(launches, order="sorted") + b"\n"


def read_launches(engine: Path) -> LaunchPlan:
    """Decode launches.json; the caller checks its hash.

    Raises:
        EngineCorruptError: unreadable, or not a launch plan.
    """
    return read_record(engine / LAUNCHES_FILE, LaunchPlan)
