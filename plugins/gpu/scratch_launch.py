"""Launches of Triton kernels over an operator's parameters and scratch buffers of their own."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trtc.plugins.gpu.lowering import DIMS, ONE, SCRATCH, Grid, Launch, Site
from trtc.plugins.gpu.sources import DEFAULT_STAGES
from trtc.plugins.gpu.triton_launch import triton_launch


def scratch_launch(
    site: Site,
    function: Any,
    constants: Mapping[str, int | float | bool | str],
    grid: Grid,
    *,
    num_warps: int,
    scratch: Mapping[str, str],
    renamed: Mapping[str, str] | None = None,
    num_stages: int = DEFAULT_STAGES,
) -> Launch:
    """A launch of a Triton function whose tensors have the names of parameters and buffers.

    Args:
        constants: all but OVERLAPS.
        scratch: element types of the scratch buffers, by name. Other tensors of the function,
            unless they are parameters of the operator or DIMS, are None.
        renamed: tensor of the function -> parameter or buffer of another name; "": None.
    """
    known = {**site.dtypes, DIMS: "i32", **scratch}
    sources = {name: (renamed or {}).get(name, name) for name in function.arg_names}
    launch = triton_launch(
        function,
        dtypes={name: known[source] for name, source in sources.items() if source in known},
        constants=constants,
        programs=ONE,
        num_warps=num_warps,
        num_stages=num_stages,
        sm=site.sm,
        max_shared_bytes=site.arch.shared_bytes,
    )
    given = [sources[name] for name in launch.arguments]
    return replace(
        launch,
        arguments=tuple(SCRATCH + name if name in scratch else name for name in given),
        grid=grid,
    )
