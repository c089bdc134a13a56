"""A step's inputs where the kernels look for them."""

import numpy as np
from msgspec.structs import replace

from trtc.protos.launch_plan import StepBlock
from trtc.runtime.executors.base import StepBatch
from trtc.runtime.executors.cuda.step_inputs import fill_step

LAYOUT = StepBlock(
    offsets={
        "dims": 0,
        "query_start": 16,
        "context_lens": 32,
        "logit_rows": 48,
        "token_ids": 64,
        "positions": 96,
        "slots": 128,
        "token_sources": 160,
        "page_table": 192,
    },
    num_elements=192 + 8 * 5,
    table_width=5,
    max_rows=8,
)
STEP = StepBatch(
    token_ids=np.array([7, 8, 9, 4], np.int32),
    positions=np.array([0, 1, 2, 11], np.int32),
    slots=np.array([16, 17, 18, 43], np.int32),
    query_start=np.array([0, 3, 4], np.int32),
    context_lens=np.array([3, 12], np.int32),
    page_table=np.array([[2, 0], [9, 5]], np.int32),
    logit_rows=np.array([2, 3], np.int32),
)


GROUPED_LAYOUT = StepBlock(
    offsets=LAYOUT.offsets | {"page_table": 224, "slots_1": 192, "page_table_1": 229},
    num_elements=224 + 8 * 5 * 2,
    table_width=5,
    max_rows=8,
    num_groups=2,
)
"""Of two groups: the tables of a sequence lie side by side."""


def part(block: np.ndarray, name: str, length: int, layout: StepBlock = LAYOUT) -> list[int]:
    begin = layout.offsets[name]
    return block[begin : begin + length].tolist()


def test_every_input_lies_at_its_offset_over_whatever_was_there() -> None:
    block = np.full(LAYOUT.num_elements, -77, np.int32)
    end = fill_step(block, LAYOUT, STEP, num_sequences=4)
    assert part(block, "dims", 4) == [4, 2, 2, 0]
    for name in ("token_ids", "positions", "slots", "logit_rows"):
        values = getattr(STEP, name).tolist()
        assert part(block, name, len(values) + 1) == [*values, -77]
    assert part(block, "page_table", 10) == [2, 0, -77, -77, -77, 9, 5, -77, -77, -77]
    assert end == LAYOUT.offsets["page_table"] + 2 * LAYOUT.table_width


def test_each_group_has_slots_and_a_table_in_every_sequences_row() -> None:
    step = replace(
        STEP,
        slots=np.array([16, 17, 18, 43, 24, 25, 26, 51], np.int32),
        page_table=np.array([[2, 0], [9, 5], [3, 0], [0, 6]], np.int32),
    )
    block = np.full(GROUPED_LAYOUT.num_elements, -77, np.int32)
    end = fill_step(block, GROUPED_LAYOUT, step, num_sequences=2)
    assert part(block, "slots", 5, GROUPED_LAYOUT) == [16, 17, 18, 43, -77]
    assert part(block, "slots_1", 5, GROUPED_LAYOUT) == [24, 25, 26, 51, -77]
    stride = GROUPED_LAYOUT.num_groups * GROUPED_LAYOUT.table_width
    for name, rows in (("page_table", [[2, 0], [9, 5]]), ("page_table_1", [[3, 0], [0, 6]])):
        table = part(block, name, 2 * stride, GROUPED_LAYOUT)
        assert [table[:3], table[stride : stride + 3]] == [[*row, -77] for row in rows]
    assert end == GROUPED_LAYOUT.offsets["page_table"] + 2 * stride


def test_sequences_that_pad_a_bucket_have_no_tokens_and_no_context() -> None:
    """Kernels find a sequence's rows between its starts: those of the padding must be empty."""
    block = np.full(LAYOUT.num_elements, -77, np.int32)
    fill_step(block, LAYOUT, STEP, num_sequences=4)
    assert part(block, "query_start", 6) == [0, 3, 4, 4, 4, -77]
    assert part(block, "context_lens", 5) == [3, 12, 0, 0, -77]
