"""The recipe of a portable TensorRT bundle, by which a GPU host builds a plan.

A bundle is an engine directory whose manifest says `tensorrt`:

    graph.onnx + weights.safetensors    standard operators and Q/DQ, plugin nodes in domain trtc
    kernels/*.ptx, *.cubin              code of the plugins, a file per specialisation and tactic
    recipe.json                         everything else that decides the plan (this file)
"""

import math
from pathlib import Path

from trtc.protos.kv import CacheLayout
from trtc.protos.manifest import Limits
from trtc.protos.numbers import Count, Index
from trtc.protos.record import Record, read_record

RECIPE_FILE = "recipe.json"
KERNELS_DIR = "kernels"
PLAN_BLOB_FILE = "model.plan"
TIMING_CACHE_FILE = "timing.cache"
TENSORRT_MAJOR = 11
MAX_ELEMENTS = 2**31 - 1
"""Most elements of one tensor: the limit of TensorRT's 32-bit element counts."""


class Profile(Record, frozen=True):
    """One optimisation profile: (min, opt, max) of each dynamic axis."""

    name: str
    extents: dict[str, tuple[Index, Index, Index]]
    """Axis symbol of the graph's inputs (T, B, P, R, num_pages) -> its range."""


class KernelFacts(Record, frozen=True):
    """One compiled kernel and the plugin nodes that it serves."""

    op: str
    dtypes: dict[str, str]
    """Element types that specialise it, by parameter."""
    attributes: dict[str, int | float | str]
    """Of the node, complete."""
    tactic: Count
    """Number from 1. Every tactic supports all shapes."""
    entry: str
    parameters: tuple[str, ...]
    """Parameters in order: tensors by name, then i32 scalars, then outputs."""
    num_threads: Count
    shared_bytes: Index
    rows: Index
    """New tokens of a sequence per block (paged_attention, attention_split), or heads of a row
    (attention_combine)."""
    ptx_target: str
    ptx_version: str
    ptx: str
    """File of the bundle."""
    cubin: str


class Recipe(Record, frozen=True, kw_only=True):
    """How `trtc compile` makes the plan."""

    tensorrt_major: int = TENSORRT_MAJOR
    sm: Count
    pool: CacheLayout
    profiles: tuple[Profile, ...]
    optimization_level: int = 3
    workspace_bytes: int = 4 << 30
    kernels: tuple[KernelFacts, ...]


def max_pool_pages(limits: Limits, kv: CacheLayout) -> int:
    """Pages of the largest pool that plans are made for: twice what a full batch needs, within
    the element count that TensorRT can address."""
    width = kv.pages_for(limits.max_seq_len) * len(kv.groups)
    page_elements = max(math.prod(kv.pool_shape(one)[1:]) for one in kv.places)
    return min(2 * limits.max_batch_size * width, MAX_ELEMENTS // page_elements)


def read_recipe(bundle: Path) -> Recipe:
    """Decode `recipe.json`; its hash is checked when the bundle is opened.

    Raises:
        EngineCorruptError: unreadable, or not a recipe.
    """
    remedy = "Build the bundle again, or copy it again"
    return read_record(bundle / RECIPE_FILE, Recipe, remedy)
