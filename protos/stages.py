"""stages.json: the stages of a step of an engine of TensorRT plans, in order.

A compiled bundle is one segment, the whole graph with its plugins inside. An engine of TensorRT
for RTX, whose plans take no plugins, is a segment before, between and after its attention layers,
and the plugins' kernels are launched between them:

    segment 0  ->  kv_write 0, paged_attention 0  ->  segment 1  ->  ...  ->  logits

Tensors have their names in the graph. The step's inputs, the pools (`kv_0` in, `kv_0_out` out, the
same memory) and the logits belong to the runtime; other tensors between stages are buffers here.
"""

from pathlib import Path

from trtc.protos.bundle import KernelFacts, Profile
from trtc.protos.kv import CacheLayout
from trtc.protos.numbers import Index, Size
from trtc.protos.plan import Buffer
from trtc.protos.record import Record, read_record

STAGES_FILE = "stages.json"
PLANS_DIR = "plans"
TENSOR_ALIGNMENT = 256
"""Alignment in bytes that TensorRT requires for tensors and scratch memory."""


class Segment(Record, frozen=True, tag="segment"):
    """A plan to execute."""

    plan: str
    """File of the engine."""
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class Launch(Record, frozen=True, tag="launch"):
    """One launch of a plugin's kernel."""

    site: str
    """The graph node, for listings and profiles."""
    op: str
    arguments: dict[str, str]
    """Tensor parameter of the kernel -> tensor or constant; scalars come from the step."""
    kernels: tuple[Index, ...]
    """For each profile, the index of its kernel among an SM's kernels."""


class Stages(Record, frozen=True, kw_only=True):
    pool: CacheLayout
    profiles: tuple[Profile, ...]
    """Profiles, in the numbering of all plans."""
    buffers: tuple[Buffer, ...]
    """Offsets are multiples of TENSOR_ALIGNMENT."""
    arena_bytes: Size
    constants: dict[str, float]
    """f32 scalars that kernels read: scales of the pools."""
    stages: tuple[Segment | Launch, ...]
    kernels: dict[str, tuple[KernelFacts, ...]]
    """SM (`sm_89`) -> its kernels; the same ones in the same order for every SM."""

    @property
    def plans(self) -> tuple[str, ...]:
        """Every plan file, in order."""
        return tuple(stage.plan for stage in self.stages if isinstance(stage, Segment))


def read_stages(engine: Path) -> Stages:
    """Decode `stages.json`; the caller checks its hash.

    Raises:
        EngineCorruptError: unreadable, or not a description of stages.
    """
    return read_record(engine / STAGES_FILE, Stages)
