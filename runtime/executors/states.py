"""States of a step: where it replaces what it went on from."""

import numpy as np

from trtc.protos.kv import CacheLayout
from trtc.runtime.executors.base import StepBatch


def replaced_states(kv: CacheLayout, batch: StepBatch) -> list[int]:
    """Pages whose state the step reads and then replaces, of sequences that go on within a page.

    Keys and values are written again alike if a step is done twice; states only if these pages are
    as they were.
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
