"""The static plan: a flat list of kernel calls over preallocated buffers.

A plan describes a step independently of the device: the CPU target generates C++ from it, the CUDA
target launches, and `trtc inspect --plan` prints it.
"""

from pathlib import Path
from typing import Literal

from trtc.protos.dtypes import DTYPES, DTypeName
from trtc.protos.kv import CacheLayout
from trtc.protos.manifest import Limits
from trtc.protos.numbers import Count, Index, Size
from trtc.protos.record import Record, read_record, record_json

Rows = Literal["T", "B", "B+1", "R", "1"]
"""Extent of a tensor's leading axis: tokens, sequences, logit rows, or one."""


class Buffer(Record, frozen=True):
    """A row-major [rows, columns] tensor in the activation arena."""

    name: str
    dtype: DTypeName
    rows: Rows
    columns: Count
    offset: Size
    """Bytes from the arena's start; a multiple of 64. Buffers with overlapping lifetimes never
    overlap."""


class Fill(Record, frozen=True):
    """The distribution of a weight for `--dummy-weights`, so that every activation stays finite.

    Floating-point elements are uniform in `center` +- `spread`; 8- and 4-bit elements are random
    bits (E4M3 without its exponent's top bit, so never NaN; compact without the small numbers)
    and take their size from their scale. i32 elements are indices: 0, 1, ... below `center`, then
    -1; or, with a `spread`, from 0 again.
    """

    element: DTypeName | Literal["compact", "e8m0"]
    """Logical element type: of the values inside when the weight is packed; compact: bf16 in the
    bytes of plugins/compact.py; e8m0: bytes that are all `center`."""
    center: float = 0.0
    spread: float = 0.0


class Weight(Record, frozen=True):
    """A tensor of weights.safetensors, already in the layout its kernel reads."""

    name: str
    dtype: DTypeName
    shape: tuple[Index, ...]
    """As stored: packed weights are rows of bytes."""
    layout: str
    """`row_major`; `packed_<weight dtype>` or `planes`: plugins/layouts.py says how; `compact`:
    plugins/compact.py; or `tiles`: plugins/tiles.py."""
    offset: Size
    """Bytes from the start of the data section; a multiple of 64."""
    bytes: Size
    fill: Fill


class Argument(Record, frozen=True):
    """One tensor argument of a call.

    `kind` says where `name` is looked up: a buffer, a weight, a step input (token_ids, ...; where
    each group of the cache layout has its own, that of group `index`), the
    KV pool's region `index`, or the step's logits. A view of some columns of a wider buffer has
    `column_offset` and `row_stride` in elements.
    """

    parameter: str
    kind: Literal["buffer", "weight", "step", "pool", "logits"]
    name: str
    dtype: DTypeName
    index: Index = 0
    column_offset: Index = 0
    row_stride: Index = 0
    columns: Index = 0


class Call(Record, frozen=True):
    """One kernel call."""

    operator: str
    """Name in plugins/registry.py."""
    site: str
    """The graph node, for listings and profiles: `layers.3.attention.qkv`."""
    arguments: tuple[Argument, ...]
    """In the operator's declared order, inputs then outputs; absent optionals are left out."""
    attributes: dict[str, int | float | str]
    axes: dict[str, int | str]
    """The operator's axis symbols: an int when static, one of `Rows` when it varies by step."""


class Plan(Record, frozen=True):
    limits: Limits
    kv: CacheLayout
    vocab_size: Count
    buffers: tuple[Buffer, ...]
    weights: tuple[Weight, ...]
    calls: tuple[Call, ...]
    arena_bytes: Size
    weights_bytes: Size
    """Length of the data section of weights.safetensors."""

    def to_json(self) -> bytes:
        return record_json(self)


def read_plan(path: Path) -> Plan:
    """Decode plan.json; the caller checks its hash.

    Raises:
        EngineCorruptError: unreadable, or not a plan.
    """
    return read_record(path, Plan)


def max_rows(rows: str, limits: Limits) -> int:
    """The largest value of a row symbol under `limits`."""
    return {
        "T": limits.max_num_tokens,
        "B": limits.max_batch_size,
        "B+1": limits.max_batch_size + 1,
        "R": limits.max_num_tokens,
        "1": 1,
    }[rows]


def buffer_bytes(buffer: Buffer, limits: Limits) -> int:
    return DTYPES[buffer.dtype].num_bytes(max_rows(buffer.rows, limits) * buffer.columns)
