"""The layout of rows with drafts in a step's arrays, and the pages to which rows write states.

In a model with states, each row with a draft writes its state to a page of its own, so that the
scheduler can take the state of the last accepted token. Drafts may be sequences of one token
(DraftRows), each of which continues from the page of the row before it:

    row      context    state from    state to
    known    21         5             8
    d1       22         8             3
    d2       23         3             9
"""

import numpy as np
from msgspec.structs import replace

from trtc.runtime.executors.base import Int32s, StepBatch
from trtc.runtime.sampling.sampler import Int64s
from trtc.runtime.scheduling.step_plan import StepPlan


def place_states(slots: Int32s, plan: StepPlan, query_start: Int64s, page_size: int) -> None:
    """Let the last rows of each sequence write their states to the scheduler's pages for them.

    Args:
        slots: [T] slots of the state group; changed in place.
    """
    for chunk, end in zip(plan.chunks, query_start[1:].tolist(), strict=True):
        if chunk.sequence.state_pages:
            pages = np.array(chunk.sequence.state_pages, np.int32)
            rows = slots[end - len(pages) : end]
            rows[:] = pages * np.int32(page_size) + rows % np.int32(page_size)


def with_drafts_apart(
    batch: StepBatch, plan: StepPlan, state_group: int | None, page_size: int
) -> StepBatch:
    """The same tokens, with each draft in a sequence of its own."""
    parts = np.array([1 + chunk.num_drafts for chunk in plan.chunks])
    behind = (parts.cumsum().repeat(parts) - np.arange(parts.sum()) - 1).astype(np.int32)
    ends = batch.query_start[1:].repeat(parts) - behind
    context_lens = batch.context_lens.repeat(parts) - behind
    width = batch.page_table.shape[1]
    tables = batch.page_table.reshape(-1, len(parts), width).repeat(parts, axis=1)
    if state_group is not None:
        (drafts,) = (behind < parts.repeat(parts) - 1).nonzero()
        slots = batch.slots.reshape(len(tables), -1)[state_group]
        before = (context_lens[drafts] - 2) // page_size
        tables[state_group, drafts, before] = slots[ends[drafts] - 2] // page_size
    return replace(
        batch,
        query_start=np.concatenate((batch.query_start[:1], ends)),
        context_lens=context_lens,
        page_table=tables.reshape(-1, width),
    )
