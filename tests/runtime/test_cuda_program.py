"""A launch plan on a device: what a step of a bucket launches."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trtc.protos.launches import (
    CallLaunches,
    CallVariant,
    GridAxis,
    KernelCall,
    KernelCode,
    LaunchPlan,
    SamplingPlan,
    StepBlock,
)
from trtc.protos.manifest import KvGeometry
from trtc.runtime.executors.cuda.buckets import Bucket
from trtc.runtime.executors.cuda.device import Kernel
from trtc.runtime.executors.cuda.program import CudaEngineFiles, Program

KERNELS = ("always", "of_five_splits")


@dataclass
class NamingDevice:
    """Implements as much of ProgramDevice as launches of kernels need."""

    launched: list[str] = field(default_factory=list)

    def load(self, cubin: bytes, entry: str, num_threads: int, shared_bytes: int) -> Kernel:
        return Kernel(cubin, entry, num_threads, shared_bytes)

    def allocate(self, num_bytes: int) -> Any:
        return np.zeros(num_bytes, np.uint8)

    def upload(self, data: Any) -> Any:
        return data

    def launch(self, kernel: Kernel, grid: Any, arguments: Any, *, overlaps: bool) -> None:
        self.launched.append(kernel.name)


def call(kernel: int, least_splits: int) -> CallLaunches:
    grid = (GridAxis(), GridAxis(), GridAxis())
    work = KernelCall(kernel, (), grid, overlaps=True, least_splits=least_splits)
    return CallLaunches(str(kernel), "tokens", (CallVariant("any", 8, (work,)),))


@pytest.mark.parametrize(
    ("splits", "launched"), [(1, ["always"]), (4, ["always"]), (5, [*KERNELS]), (8, [*KERNELS])]
)
def test_a_launch_is_left_out_where_contexts_are_too_short_for_it(
    splits: int, launched: list[str], tmp_path: Path
) -> None:
    for name in KERNELS:
        (tmp_path / name).write_bytes(b"")
    launches = LaunchPlan(
        sm=90,
        split_keys=256,
        max_splits=64,
        kernels=tuple(KernelCode(name, name, 32, 0) for name in KERNELS),
        calls=(call(0, 0), call(1, 5)),
        sampling=SamplingPlan(stages={}, tensors={}, bytes=1),
        step=StepBlock(offsets={}, num_elements=1, table_width=1, max_rows=1),
        arena_bytes=1,
        scratch_bytes=1,
    )
    kv = KvGeometry(num_layers=1, page_size=1, num_kv_heads=1, head_dim=1, dtype="bf16")
    device: Any = NamingDevice()
    files = CudaEngineFiles(tmp_path, launches, np.zeros(1, np.uint8))
    program = Program(files, device, kv=kv, vocab_size=1, num_pages=1)
    program.run(Bucket("decode", tokens=8, sequences=8, rows=8, splits=splits))
    assert device.launched == launched
