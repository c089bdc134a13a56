"""Uploads a step's int32 inputs, and the sizes by which profiles and graphs are chosen."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from trtc.protos.stages import TENSOR_ALIGNMENT
from trtc.protos.step import StepInput, graph_inputs, in_block_order
from trtc.runtime.device.base import DriverDevice
from trtc.runtime.executors.base import Int32s, StepBatch

Shape = tuple[int | str, ...]
"""Extents: a number, or the symbol of a dynamic axis."""


@dataclass(frozen=True)
class StepTensor:
    """One of the plans' int32 inputs."""

    name: str
    """Name in the graph."""
    input: StepInput
    group: int
    """Group of the cache layout whose part of the input this is."""


def input_tensors(num_groups: int) -> tuple[StepTensor, ...]:
    """The step's inputs in the order of their block."""
    tensors = [StepTensor(*one) for one in graph_inputs(num_groups)]
    order = in_block_order(dict.fromkeys(one.input for one in tensors))
    return tuple(sorted(tensors, key=lambda one: order.index(one.input)))


@dataclass(frozen=True)
class StepSizes:
    """Extents of a step for plans."""

    num_tokens: int
    num_sequences: int
    table_width: int
    """Pages of a row of the page table: a power of two, or the longest sequence's."""
    num_rows: int
    """Logit rows."""

    def extents(self, num_pages: int) -> Mapping[str, int]:
        """Axis symbol -> extent."""
        return {
            "T": self.num_tokens,
            "B": self.num_sequences,
            "B+1": self.num_sequences + 1,
            "P": self.table_width,
            "R": self.num_rows,
            "num_pages": num_pages,
        }


def resolve(shape: Shape, extents: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(axis if isinstance(axis, int) else extents[axis] for axis in shape)


class StepInputs:
    """The step's inputs at fixed addresses, filled from page-locked memory: one copy for all up to
    the first page table, and one for each further table."""

    def __init__(
        self, device: DriverDevice, largest: Mapping[str, int], num_groups: int = 1
    ) -> None:
        """Allocate for steps of the `largest` extent of each axis, and `num_groups` groups of the
        cache layout."""
        self._device = device
        self._max_width = largest["P"]
        self._num_groups = num_groups
        self._tensors = input_tensors(num_groups)
        self._offsets: dict[str, int] = {}
        end = 0
        for one in self._tensors:
            self._offsets[one.name] = end
            size = 4 * int(np.prod(resolve(one.input.shape, largest)))
            end += -(-size // TENSOR_ALIGNMENT) * TENSOR_ALIGNMENT
        self._staging = device.host_buffer(end)
        self._base = device.allocate(end)
        self.addresses: Mapping[str, int] = {
            name: self._base + offset for name, offset in self._offsets.items()
        }

    def upload(self, batch: StepBatch) -> StepSizes:
        """Enqueue the copy of a step's inputs; no earlier step may be in flight.

        Plans do not support empty tensors: a step without logits requests those of row 0. Rows of
        the page table are padded to one of few widths, because each width is a separate shape. The
        padding is page 0, which is never read.
        """
        table = batch.page_table
        width = min(1 << (max(1, table.shape[1]) - 1).bit_length(), self._max_width)
        padded = np.zeros((len(table), width), np.int32)
        padded[:, : table.shape[1]] = table
        rows = batch.logit_rows if len(batch.logit_rows) else np.zeros(1, np.int32)
        taken = replace(batch, page_table=padded, logit_rows=rows)
        for one in self._tensors:
            values = getattr(taken, one.input.name)
            if one.input.per_group:
                values = np.split(values, self._num_groups)[one.group]
            offset = self._offsets[one.name]
            end = offset + self._stage(offset, values)
            if one.input.is_table:
                begin = offset if one.group else 0
                self._device.upload(self._base + begin, self._staging[begin:end])
        return StepSizes(
            num_tokens=len(batch.token_ids),
            num_sequences=len(batch.context_lens),
            table_width=width,
            num_rows=len(rows),
        )

    def _stage(self, offset: int, values: Int32s) -> int:
        flat = np.ascontiguousarray(values, np.int32).reshape(-1).view(np.uint8)
        self._staging[offset : offset + len(flat)] = flat
        return len(flat)
