"""The lowering of an operator's call to GPU launches, which each `plugins/*/cuda.py` returns.

    plan call -> Site -> lower(site) -> Variant, Variant, ... -> the engine's launch list

A launch is replayed as part of a CUDA graph that was captured for a bucket of tokens and
sequences, so a grid covers the bucket and kernels read from `dims` how many rows are real. What
lies in the rows after them is stale and must neither be trusted nor, in the pool, written.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from trtc.plugins.gpu.arch import ARCHS, Arch
from trtc.plugins.gpu.sources import CudaSource, KernelSource
from trtc.protos import launch_plan
from trtc.protos.manifest import Limits

DIMS = "dims"
"""Kernel argument: i32 [4] on the device: tokens, sequences, logit rows of this step, and 0."""
NEXT_WEIGHT = "next_weight"
"""Kernel argument: the next call's weight in tiles; see `Site.next_weight_bytes`."""
SCRATCH = "scratch."
"""Prefix of the arguments that are buffers of `Variant.scratch`, or `Variant.views` of them."""

Axis = launch_plan.Axis
"""Axes that a grid depends on: tokens (T), sequences (B) and logit rows (R) of the captured bucket,
and the splits of its longest context (plugins/attention/split_kv.py)."""
StepKind = Literal["decode", "any"]
"""decode: every sequence has exactly one new token, so T = B."""


@dataclass(frozen=True)
class Extent:
    """Programs along one axis of a grid: times * (ceil(axis / block) + plus), where `plus` is
    another axis' length if it is named."""

    axis: Axis = "one"
    block: int = 1
    times: int = 1
    plus: Axis | None = None


Grid = tuple[Extent, Extent, Extent]
ONE = Extent()


@dataclass(frozen=True)
class Site:
    """One call, with everything that is known at build."""

    dtypes: Mapping[str, str]
    """Element type of every parameter that is present; absent optionals are left out."""
    strides: Mapping[str, int]
    """Elements from a row to the next, of every parameter that is present: views of a wider
    buffer have more than their columns. Rows and views begin at a multiple of 16 bytes."""
    axes: Mapping[str, int]
    """The operator's axis symbols that are static, those that integer attributes give included."""
    attributes: Mapping[str, int | float | str]
    rows: Literal["tokens", "rows"]
    """The operator's axis M: all tokens, or the logit rows gathered from them."""
    page_size: int
    """Tokens of a KV page."""
    limits: Limits
    sm: int
    next_weight_bytes: int = 0
    """Of NEXT_WEIGHT, which may be fetched while memory is idle; 0: the next call has none."""
    num_groups: int = 1
    """Of the cache layout."""

    @property
    def table_width(self) -> int:
        """Row stride of `page_table`: pages of the longest sequence, for each group of the cache
        layout. `page_table` begins at those of the call's own group."""
        return self.num_groups * -(-self.limits.max_seq_len // self.page_size)

    @property
    def arch(self) -> Arch:
        return ARCHS[self.sm]

    def has(self, parameter: str) -> bool:
        return parameter in self.dtypes


@dataclass(frozen=True)
class TileMap:
    """Where TMA finds a parameter: bytes in up to five dimensions, and the
    tile that a copy takes of them, as in gpu/tensor_map.cuh's Tiled."""

    parameter: str
    sizes: tuple[int, ...]
    """The first of bytes; what a copy finds beyond is zeros."""
    strides: tuple[int, ...]
    """Bytes, a multiple of 16, from one to the next of every dimension but the first."""
    box: tuple[int, ...]
    """The first is 128 bytes, a row of a panel in shared memory."""


@dataclass(frozen=True)
class Launch:
    """One kernel launch."""

    kernel: KernelSource | CudaSource
    arguments: tuple[str, ...]
    """What each of the kernel's parameters but `maps` is: a parameter of the operator, DIMS, or
    SCRATCH and the name of a scratch buffer. Every one is an address."""
    grid: Grid
    overlaps: bool = False
    """Programmatic dependent launch (PDL): it may start before the kernel before it
    has ended, and waits for it itself (griddepcontrol.wait) before it reads what that wrote. Step
    inputs, `dims` and pages of earlier steps it may read before it waits: nothing that writes them
    lets the next kernel start early."""
    maps: tuple[TileMap, ...] = ()
    """The kernel's last parameters: addresses of tensor maps that are made when the engine is
    opened, which costs a kernel that makes its own a microsecond."""
    may_wait_last: bool = False
    """Its kernel may run beside the one before it (gpu/concurrent.py)."""
    least_splits: int = 0
    """Where a bucket's longest context falls into fewer (the axis "splits"), the launch has nothing
    to do, and is left out."""


@dataclass(frozen=True)
class Gemm:
    """One call of cuBLASLt:

        out = x @ weight.T (* input_scale or row_scale, * weight_scale) (+ residual) (+ bias)

    Fields name the operator's parameters, or scratch buffers (bf16, without gaps between rows);
    "" is none. x [rows, K] and weight [N, K] are bf16 or f32 (then without scales), or f8e4m3 with
    both scales; weight_scale is one a row of the weight, row_scale one a row of x. The residual is
    of the type of out.
    """

    x: str = "x"
    weight: str = "weight"
    out: str = "out"
    input_scale: str = ""
    weight_scale: str = ""
    bias: str = ""
    residual: str = ""
    row_scale: str = ""


@dataclass(frozen=True)
class Collective:
    """One call of NCCL by every rank, for all rows of the bucket.

    Fields name parameters of the operator, or scratch buffers; both are without gaps between rows.

        all_reduce    target [rows, K] = the sum of every rank's source [rows, K]
        all_gather    target [ranks, rows, K] = every rank's source [rows, K]
    """

    kind: Literal["all_reduce", "all_gather"]
    source: str
    target: str


@dataclass(frozen=True)
class Variant:
    """One way to run a call."""

    work: tuple[Launch | Gemm | Collective, ...]
    max_rows: int
    """Right for every bucket of up to so many rows (of the call's row axis)."""
    kind: StepKind = "any"
    scratch: Mapping[str, int] = field(default_factory=dict)
    """Bytes of temporary buffers, which live for this call only."""
    views: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    """Named views of the scratch buffers: (buffer, offset in bytes)."""


Lower = Callable[[Site], tuple[Variant, ...]]
"""The variants of a site, by ascending `max_rows`; the first that fits a bucket is used. The last
of kind "any" fits every step within the site's limits."""
