"""States that a step overwrites in place."""

import numpy as np

from trtc.protos.kv import CacheLayout
from trtc.runtime.executors.base import StepBatch


def replaced_states(kv: CacheLayout, batch: StepBatch) -> list[int]:
    """Pages whose state the step reads and then overwrites: those of sequences that continue within
    a page.

    If a step is run twice, it writes the same keys and values again. The same states need these
    pages to be restored first.
    """
    starts = batch.context_lens - np.diff(batch.query_start)
    within = np.flatnonzero(starts % kv.page_size)
    tables = batch.page_table.reshape(max(1, len(kv.groups)), len(starts), -1)
    return [
        int(page)
        for group, table in zip(kv.groups, tables, strict=False)
        if group.is_state
        for page in table[within, starts[within] // kv.page_size]
    ]
