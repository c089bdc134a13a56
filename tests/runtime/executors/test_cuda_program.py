"""A launch plan on a device: what a step of a bucket launches."""

from pathlib import Path

import pytest

from tests.support.kernel_programs import NamingDevice, open_program
from trtc.protos.launch_plan import CallLaunches, CallVariant, GridAxis, KernelCall
from trtc.runtime.executors.cuda.buckets import Bucket

KERNELS = ("always", "of_five_splits")


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
    device = NamingDevice()
    program = open_program(tmp_path, device, KERNELS, (call(0, 0), call(1, 5)), max_splits=64)
    program.run(Bucket("decode", tokens=8, sequences=8, rows=8, splits=splits))
    assert device.asked == launched
