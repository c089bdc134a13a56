"""The block of a step's inputs on the device, and the launches of the sampler."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from trtc.builder.memory import align
from trtc.plugins.gpu.lowering import DIMS, Extent, Grid, Launch
from trtc.plugins.sampling.tensors import sampling_tensors
from trtc.protos.launch_plan import (
    Address,
    GridAxis,
    KernelCall,
    SamplingPlan,
    SamplingTensor,
    StepBlock,
)
from trtc.protos.manifest import Limits
from trtc.protos.plan import Plan
from trtc.protos.step import STEP_INPUTS, Symbol, group_input, in_block_order

_MAX_SPARSE = 1 << 20
"""Biases, and distinct tokens that penalties look at, of all rows of a step; a step with more is
sampled on the host."""


@dataclass(frozen=True)
class Numbered:
    """A launch whose kernel has its number in the launch plan."""

    kernel: int
    launch: Launch


def step_block(plan: Plan) -> StepBlock:
    """Room for every input at the largest step; `dims` is tokens, sequences, logit rows and 0."""
    limits = plan.limits
    width = plan.kv.pages_for(limits.max_seq_len)
    largest: Mapping[Symbol, int] = {
        "T": limits.max_num_tokens,
        "B": limits.max_batch_size,
        "B+1": limits.max_batch_size + 1,
        "P": width,
        "R": limits.max_batch_size,
    }
    extents = {DIMS: 4}
    for tensor in sampling_tensors(plan.vocab_size):
        if tensor.role == "input" and tensor.rows in ("rows", "rows+1"):
            extents[tensor.name] = _capacity(tensor.rows, limits) * tensor.columns
    num_groups = max(1, len(plan.kv.groups))
    tables = []
    for one in in_block_order(STEP_INPUTS):
        extent = math.prod(largest[symbol] for symbol in one.shape)
        if one.is_table:
            tables.append(one.name)
            extents[one.name] = num_groups * extent
            continue
        for group in range(num_groups if one.per_group else 1):
            extents[group_input(one.name, group)] = extent
    offsets, end = {}, 0
    for name, extent in extents.items():
        offsets[name] = end
        end += align(4 * extent) // 4
    for name in tables:
        for group in range(1, num_groups):
            offsets[group_input(name, group)] = offsets[name] + group * width
    return StepBlock(
        offsets=offsets,
        num_elements=end,
        table_width=width,
        max_rows=limits.max_batch_size,
        num_groups=num_groups,
    )


def plan_sampling(
    plan: Plan, sm: int, block: StepBlock, number: Callable[[Launch], Numbered]
) -> SamplingPlan:
    """Resolve the sampler's stages.

    Args:
        number: gives a launch's kernel its number.
    """
    from trtc.plugins.sampling.cuda import stages

    tensors, end = {}, 0
    for one in sampling_tensors(plan.vocab_size):
        if one.name not in block.offsets:
            rows = _capacity(one.rows, plan.limits)
            tensors[one.name] = SamplingTensor(offset=end, rows=rows, columns=one.columns)
            end = align(end + 4 * rows * one.columns)
    names = {name: Address(space="step", name=name) for name in block.offsets}
    names |= {
        name: Address(space="sampling", offset=tensor.offset) for name, tensor in tensors.items()
    }
    names["logits"] = Address(space="logits")
    return SamplingPlan(
        stages={
            stage: tuple(_call(number(launch), names) for launch in launches)
            for stage, launches in stages(plan.vocab_size, sm).items()
        },
        tensors=tensors,
        bytes=end,
    )


def grid_axes(grid: Grid) -> tuple[GridAxis, GridAxis, GridAxis]:
    x, y, z = (_axis(extent) for extent in grid)
    return x, y, z


def _axis(extent: Extent) -> GridAxis:
    return GridAxis(axis=extent.axis, block=extent.block, times=extent.times, plus=extent.plus)


def _call(one: Numbered, names: Mapping[str, Address]) -> KernelCall:
    return KernelCall(
        kernel=one.kernel,
        arguments=tuple(names[name] for name in one.launch.arguments),
        grid=grid_axes(one.launch.grid),
        overlaps=one.launch.overlaps,
    )


def _capacity(rows: str, limits: Limits) -> int:
    batch = limits.max_batch_size
    sparse = min(_MAX_SPARSE, batch * limits.max_seq_len)
    return {
        "rows": batch,
        "rows+1": batch + 1,
        "tokens": limits.max_num_tokens,
        "seen": sparse,
        "biased": sparse,
        "masked": batch,
    }[rows]
