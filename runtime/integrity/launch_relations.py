"""Checks the indices of a CUDA engine's launch plan."""

from trtc.protos.errors import EngineCorruptError
from trtc.protos.launch_plan import KernelCall, LaunchPlan
from trtc.runtime.integrity.engine_files import REBUILD


def check_launches(launches: LaunchPlan) -> None:
    """Check that all indices into the launch plan's tables are in range.

    Raises:
        EngineCorruptError: an index is not.
    """
    calls = (
        work
        for call in launches.calls
        for variant in call.variants
        for work in variant.work
        if isinstance(work, KernelCall)
    )
    drawn = (work for stage in launches.sampling.stages.values() for work in stage)
    most = max((work.kernel for work in (*calls, *drawn)), default=-1)
    if most >= len(launches.kernels):
        raise EngineCorruptError(
            f"has kernel {most} of {len(launches.kernels)}", field="launches.json", remedy=REBUILD
        )
