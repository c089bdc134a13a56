"""Fills the int32 block in which a step's inputs are copied to the device at once."""

import numpy as np
from numpy.typing import NDArray

from trtc.protos.launch_plan import StepBlock
from trtc.protos.step import (
    SAMPLING_COLUMNS,
    SPARSE_COLUMNS,
    STEP_INPUTS,
    group_input,
    in_block_order,
)
from trtc.runtime.executors.base import NO_SOURCE, Int32s, StepBatch
from trtc.runtime.sampling.philox import uniforms
from trtc.runtime.sampling.sampler import NO_PENDING, SamplingBatch, SparseRows

_COLUMNS = tuple(one.name for one in SAMPLING_COLUMNS if one.device_dtype)
"""Columns of 32 bits, which are copied bitwise."""
_INPUTS = in_block_order(STEP_INPUTS)
_PADDED = {one.name for one in STEP_INPUTS if one.shape in (("B",), ("B+1",))}
_NO_MASK = -1
_LOW_BITS = 27
"""Low bits of a random number's 53."""


def fill_step(block: Int32s, layout: StepBlock, batch: StepBatch, num_sequences: int) -> int:
    """Write a step into `block`; returns the number of leading elements to send.

    Sequences after the real ones, up to `num_sequences`, are empty: no new tokens, no context.
    """
    tokens, sequences = len(batch.token_ids), len(batch.context_lens)
    _put(block, layout, "dims", (tokens, sequences, len(batch.logit_rows), 0))
    end = 0
    for one in _INPUTS:
        begin, values = layout.offsets[one.name], getattr(batch, one.name)
        if values is None:
            values = np.full(tokens, NO_SOURCE, np.int32)
        if one.is_table:
            rows = (sequences, layout.num_groups, layout.table_width)
            end = begin + sequences * layout.num_groups * layout.table_width
            by_group = values.reshape(layout.num_groups, sequences, values.shape[1])
            block[begin:end].reshape(rows)[:, :, : values.shape[1]] = by_group.swapaxes(0, 1)
            continue
        if one.per_group:
            for group, part in enumerate(values.reshape(layout.num_groups, tokens)):
                _put(block, layout, group_input(one.name, group), part)
            continue
        end = begin + len(values)
        block[begin:end] = values
        if one.name in _PADDED:
            empty = values[-1] if one.shape == ("B+1",) else 0
            block[end : end + num_sequences - sequences] = empty
    return end


def sampling_part(layout: StepBlock) -> slice:
    """The part of the block that `fill_sampling` writes."""
    inputs = {one.name for one in STEP_INPUTS}
    begins = [offset for name, offset in layout.offsets.items() if name in _COLUMNS]
    ends = [offset for name, offset in layout.offsets.items() if name in inputs]
    return slice(min(begins), min(ends))


def fill_sampling(block: Int32s, layout: StepBlock, sampling: SamplingBatch) -> None:
    """Write how each logit row is drawn, its random number included."""
    for name in _COLUMNS:
        _put(block, layout, name, getattr(sampling, name).view(np.int32))
    _put(block, layout, "random", _random_words(sampling))
    for one in SPARSE_COLUMNS:
        starts = row_starts(getattr(sampling, one.name), sampling.num_rows)
        _put(block, layout, f"{one.name}_start", starts)
    pending = layout.offsets["pending"]
    block[pending : pending + sampling.num_rows] = (
        NO_PENDING if sampling.pending is None else sampling.pending
    )
    if sampling.masks is not None:
        index = np.full(sampling.num_rows, _NO_MASK, np.int32)
        index[sampling.masks.rows] = np.arange(len(sampling.masks.rows))
        _put(block, layout, "mask_index", index)


def row_starts(entries: SparseRows, num_rows: int) -> Int32s:
    """[num_rows + 1] where the entries of each row begin; they are sorted by row."""
    if not len(entries.rows):  # in most steps
        return np.zeros(num_rows + 1, np.int32)
    return np.searchsorted(entries.rows, np.arange(num_rows + 1)).astype(np.int32)


def _random_words(sampling: SamplingBatch) -> Int32s:
    """[2 R] upper 26 and lower 27 bits of each row's number in [0, 1); greedy rows need none."""
    if not sampling.temperature.any():
        return np.zeros(2 * sampling.num_rows, np.int32)
    numbers = uniforms(sampling.seed, sampling.sequence, sampling.position)
    bits: NDArray[np.int64] = (numbers * 2.0**53).astype(np.int64)
    words = np.stack((bits >> _LOW_BITS, bits & ((1 << _LOW_BITS) - 1)), axis=1)
    return words.astype(np.int32).reshape(-1)


def _put(
    block: Int32s, layout: StepBlock, name: str, values: Int32s | tuple[int, int, int, int]
) -> None:
    begin = layout.offsets[name]
    block[begin : begin + len(values)] = values
