"""Launches of the kernels of quant/triton_kernels.py."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from trtc.plugins.gpu.sources import KernelParameter, KernelSource
from trtc.quant import triton_kernels
from trtc.quant.block_steps import BLOCK
from trtc.quant.code_grid import SHARES, CodeGrid

_ROWS = 8
"""Of a block that a program takes: what one warp has registers for. Its sums over columns need no
barrier."""
_GROUPED_WEIGHTS = 2048
"""Weights of the groups whose scales a program looks for."""


class TritonSteps:
    """See BlockSteps.

    Args:
        device: of all tensors.
    """

    def __init__(self, grid: CodeGrid, device: torch.device) -> None:
        self._grid = grid
        self._shares = grid.tried_shares.to(device)
        self._numbers = grid.halves.to(device) if _has_table(grid) else None

    def best_scales(
        self, groups: torch.Tensor, widest: torch.Tensor, unit: torch.Tensor
    ) -> torch.Tensor:
        found = torch.empty_like(widest)
        _launch(
            best_scales(self._grid, groups.shape[-1]),
            widest.numel(),
            groups.contiguous(),
            widest.contiguous(),
            unit.expand_as(widest).contiguous(),
            self._shares,
            self._numbers,
            found,
            widest.numel(),
        )
        return found

    def round_block(
        self, block: torch.Tensor, scales: torch.Tensor, upper: torch.Tensor, codes: torch.Tensor
    ) -> None:
        rows, columns = block.shape
        tensors = (block, scales, upper.contiguous(), self._numbers, codes)
        strides = (block.stride(0), codes.stride(0))
        _launch(round_block(self._grid), rows, *tensors, rows, columns, *strides)

    def descend_block(
        self,
        codes: torch.Tensor,
        scales: torch.Tensor,
        residual: torch.Tensor,
        gram: torch.Tensor,
        unit: torch.Tensor,
        *,
        fit_scales: bool,
    ) -> torch.Tensor:
        rows, columns = codes.shape
        change = residual.new_empty(rows, columns)
        strides = (one.stride(0) for one in (codes, scales, residual, gram))
        tensors = (codes, scales, residual, gram, unit, self._numbers, change)
        source = descend_block(self._grid, columns // scales.shape[1], fit_scales=fit_scales)
        _launch(source, rows, *tensors, rows, columns, *strides)
        return change


def best_scales(grid: CodeGrid, group_size: int) -> KernelSource:
    constants = {
        "GROUP_SIZE": group_size,
        "SHARES": SHARES,
        "BYTE_SCALES": grid.byte_scales,
        "ROWS": _GROUPED_WEIGHTS // group_size,
    }
    pointers = ("groups", "widest", "units", "shares", "numbers", "found")
    return _source(
        triton_kernels.best_scales, grid, pointers, ("num_groups",), constants, num_warps=4
    )


def round_block(grid: CodeGrid) -> KernelSource:
    scalars = ("num_rows", "num_columns", "block_stride", "codes_stride")
    pointers = ("block", "scales", "upper", "numbers", "codes")
    constants = {"ROWS": _ROWS, "COLUMNS": BLOCK}
    return _source(triton_kernels.round_block, grid, pointers, scalars, constants, num_warps=1)


def descend_block(grid: CodeGrid, group_size: int, *, fit_scales: bool = True) -> KernelSource:
    strides = ("codes_stride", "scales_stride", "residual_stride", "gram_stride")
    constants = {
        "GROUP_SIZE": group_size,
        "BYTE_SCALES": grid.byte_scales,
        "FIT_SCALES": fit_scales,
        "ROWS": _ROWS,
        "COLUMNS": BLOCK,
    }
    pointers = ("codes", "scales", "residual", "gram", "unit", "numbers", "change")
    scalars = ("num_rows", "num_columns", *strides)
    return _source(triton_kernels.descend_block, grid, pointers, scalars, constants, num_warps=1)


def _source(
    function: Any,
    grid: CodeGrid,
    pointers: Sequence[str],
    scalars: Sequence[str],
    constants: Mapping[str, int],
    *,
    num_warps: int,
) -> KernelSource:
    absent = () if _has_table(grid) else ("numbers",)
    code = "f32" if grid.is_e4m3 else "i8"
    parameters = (
        *(
            KernelParameter(name, code if name == "codes" else "f32")
            for name in pointers
            if name not in absent
        ),
        *(KernelParameter(name, "i32", is_pointer=False) for name in scalars),
    )
    numbers = {
        "FIRST": int(grid.numbers[0]),
        "LAST": int(grid.numbers[-1]),
        "IS_E4M3": grid.is_e4m3,
    }
    return KernelSource(function, parameters, {**constants, **numbers}, num_warps, absent=absent)


def _has_table(grid: CodeGrid) -> bool:
    """Whether kernels look numbers up."""
    return not grid.is_contiguous and not grid.is_e4m3


def _launch(source: KernelSource, num_rows: int, *arguments: torch.Tensor | int | None) -> None:
    """Launch a kernel on the device of its first argument, for so many rows."""
    with torch.cuda.device_of(arguments[0]):  # type: ignore[no-untyped-call]
        programs = -(-num_rows // int(source.constants["ROWS"]))
        source.function[(programs,)](*arguments, **source.constants, num_warps=source.num_warps)
