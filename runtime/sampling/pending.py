"""Adds pending tokens, which the host did not know when a batch was made, to its penalty counts."""

import numpy as np
from msgspec.structs import replace

from trtc.runtime.sampling.sampler import NO_PENDING, Int32s, SamplingBatch, SparseRows


def with_pending_counted(batch: SamplingBatch, sampled: Int32s) -> SamplingBatch:
    """The batch, with every pending token in `seen`.

    Args:
        sampled: tokens drawn by the previous step, to whose rows `batch.pending` refers.
    """
    if batch.pending is None:
        return batch
    rows = np.flatnonzero(batch.pending != NO_PENDING).astype(np.int32)
    token_ids = sampled[batch.pending[rows]]
    seen = batch.seen
    known, drawn = _keys(seen.rows, seen.token_ids), _keys(rows, token_ids)
    counted = replace(seen, values=seen.values + np.isin(known, drawn))
    is_new = ~np.isin(drawn, known)
    once = np.ones(int(is_new.sum()), np.int32)
    added = SparseRows(rows[is_new], token_ids[is_new], once)
    return replace(batch, seen=counted.joined(added), pending=None)


def _keys(rows: Int32s, token_ids: Int32s) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """A unique number for each (row, token)."""
    return rows.astype(np.int64) << 32 | token_ids
