"""Launch plans of kernels alone, opened on a device that writes down what it is asked for."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.caches import uniform_layout
from trtc.protos.launch_plan import CallLaunches, KernelCode, LaunchPlan, SamplingPlan, StepBlock
from trtc.runtime.executors.cuda.device import HostArray, Kernel
from trtc.runtime.executors.cuda.program import CudaEngineFiles, Program


@dataclass
class NamingDevice:
    """Implements as much of ProgramDevice as launches of kernels need."""

    asked: list[str] = field(default_factory=list)
    """Names of the kernels that were launched."""

    def load(self, cubin: bytes, entry: str, num_threads: int, shared_bytes: int) -> Kernel:
        return Kernel(cubin, entry, num_threads, shared_bytes)

    def allocate(self, num_bytes: int) -> Any:
        return np.zeros(num_bytes, np.uint8)

    def upload(self, data: Any) -> Any:
        return data

    def launch(self, kernel: Kernel, grid: Any, arguments: Any, *, overlaps: bool) -> None:
        self.asked.append(kernel.name)


def open_program(
    engine: Path,
    device: Any,
    kernels: Sequence[str],
    calls: Sequence[CallLaunches],
    *,
    max_splits: int = 1,
) -> Program:
    """A plan of some calls of empty kernels, whose files are written to `engine`."""
    for name in kernels:
        (engine / name).write_bytes(b"")
    launches = LaunchPlan(
        sm=90,
        split_keys=256,
        max_splits=max_splits,
        kernels=tuple(KernelCode(name, name, 32, 0) for name in kernels),
        calls=tuple(calls),
        sampling=SamplingPlan(stages={}, tensors={}, bytes=1),
        step=StepBlock(offsets={}, num_elements=1, table_width=1, max_rows=1),
        arena_bytes=1,
        scratch_bytes=1,
    )
    kv = uniform_layout(num_layers=1, page_size=1, num_kv_heads=1, head_dim=1, dtype="bf16")
    files = CudaEngineFiles(engine, launches, HostArray(np.zeros(1, np.uint8)))
    return Program(files, device, kv=kv, vocab_size=1, num_pages=1)
