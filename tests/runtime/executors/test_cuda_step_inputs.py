"""A step's inputs where the kernels look for them."""

import numpy as np

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


def part(block: np.ndarray, name: str, length: int) -> list[int]:
    begin = LAYOUT.offsets[name]
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


def test_sequences_that_pad_a_bucket_have_no_tokens_and_no_context() -> None:
    """Kernels find a sequence's rows between its starts: those of the padding must be empty."""
    block = np.full(LAYOUT.num_elements, -77, np.int32)
    fill_step(block, LAYOUT, STEP, num_sequences=4)
    assert part(block, "query_start", 6) == [0, 3, 4, 4, 4, -77]
    assert part(block, "context_lens", 5) == [3, 12, 0, 0, -77]
