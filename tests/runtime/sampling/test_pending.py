"""Tokens that the host learns late are counted as if it had known them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.support.sampling_oracle import Case, cases, with_last_pending
from trtc.protos.sampling import SamplingParams
from trtc.runtime.sampling.pending import with_pending_counted
from trtc.runtime.sampling.sampler import SamplingBatch, SparseRows, sample


def as_dict(sparse: SparseRows) -> dict[tuple[int, int], int]:
    triples = zip(sparse.rows.tolist(), sparse.token_ids.tolist(), sparse.values, strict=True)
    return {(row, token): int(value) for row, token, value in triples}


@given(case=cases([10, 700]), seed=st.integers(0, 2**32 - 1))
def test_counts_are_those_of_whole_outputs(case: Case, seed: int) -> None:
    batch, sampled = with_last_pending(case, seed)
    counted = with_pending_counted(batch, sampled)
    assert counted.pending is None
    assert as_dict(counted.seen) == as_dict(case.batch.seen)
    assert len(counted.seen.rows) == len(as_dict(counted.seen)), "a token occurs once a row"
    assert (np.diff(counted.seen.rows) >= 0).all()
    assert counted.seen.values.dtype == counted.seen.rows.dtype == np.int32
    assert sample(case.logits, counted).token_ids.tolist() == (
        sample(case.logits, case.batch).token_ids.tolist()
    )


def test_the_host_s_sampler_refuses_tokens_that_nobody_counted() -> None:
    batch = SamplingBatch.of([SamplingParams(presence_penalty=1.0)])
    pending = replace(batch, pending=np.array([0], np.int32))
    with pytest.raises(AssertionError, match="pending"):
        sample(np.zeros((1, 4), np.float32), pending)
