"""attention_split and attention_combine by their references: together they are paged_attention."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.attention_case import Sequence, make_batch
from trtc.plugins.attention.split_kv import CUDA, TENSORRT, SplitKv
from trtc.plugins.attention_combine.reference import reference as combine
from trtc.plugins.attention_split.reference import reference as split
from trtc.plugins.paged_attention.reference import reference as whole

BATCH = [Sequence(1, 1), Sequence(700, 1), Sequence(300, 30), Sequence(5, 0), Sequence(257, 1)]


FAMILIES = st.sampled_from([CUDA, TENSORRT])


@given(
    FAMILIES, st.integers(1, 200_000), st.sampled_from([0, 1, 100, 4096]), st.booleans(), st.data()
)
def test_splits_cover_what_a_token_sees_once(
    family: SplitKv, context: int, window: int, chunked: bool, data: st.DataObject
) -> None:
    most = data.draw(st.integers(1, family.max_splits))
    found = family.ranges(context, window, most, chunked=chunked)
    assert 1 <= len(found) <= most
    first = max(0, context - window) if window else 0
    if window and chunked:
        first = max(range(0, context, window))
    assert first - family.alignment < found[0][0] <= first
    assert found[-1][1] == context
    for (begin, end), (following, _) in zip(found, [*found[1:], (context, 0)], strict=True):
        assert begin < end == following and begin % family.alignment == 0
        assert end == context or end - begin >= family.keys


@given(FAMILIES, st.integers(1, 100_000), st.sampled_from([0, 100, 4096]), st.booleans())
def test_no_sequence_has_more_splits_than_the_longest(
    family: SplitKv, longest: int, window: int, chunked: bool
) -> None:
    most = family.most(longest, window)
    for context in {1, longest // 3 + 1, longest}:
        found = family.ranges(context, window, most, chunked=chunked)
        assert len(found) <= min(most, -(-context // family.keys))


@pytest.mark.parametrize(
    ("window", "chunked", "softcap"), [(0, 0, 0.0), (400, 0, 0.0), (400, 1, 0.0), (0, 0, 3.0)]
)
@pytest.mark.parametrize(("dtype", "pool_dtype"), [("f32", "f32"), ("bf16", "f8e4m3")])
def test_split_and_combined_it_is_paged_attention(
    window: int, chunked: int, softcap: float, dtype: str, pool_dtype: str
) -> None:
    shape: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    batch = make_batch(BATCH, page_size=8, dtype=dtype, pool_dtype=pool_dtype, **shape)
    steps = (batch.query_start, batch.context_lens)
    scales = (np.asarray(0.5, np.float32), np.asarray(2.0, np.float32))
    inputs = (batch.q, batch.pool, *steps, batch.page_table, *scales)
    attributes: dict[str, Any] = {
        **shape,
        "scale": 0.25,
        "window": window,
        "chunked": chunked,
        "softcap": softcap,
        "out_dtype": dtype,
    }
    (wanted,) = whole(*inputs, pre_scale=None, out_scale=None, sinks=None, **attributes)
    rows, *sums = split(*inputs, splits=3, **attributes)
    split_rows = [1, 32]
    assert not rows[split_rows].any(), "rows in splits are attention_combine's to write"
    partial, stats = (one.astype(np.float32) for one in sums)
    (found,) = combine(
        rows,
        partial,
        stats,
        *steps,
        num_heads=4,
        head_dim=16,
        window=window,
        chunked=chunked,
        splits=3,
    )
    others = np.setdiff1d(np.arange(len(rows)), split_rows)
    assert np.array_equal(found[others], wanted[others])
    np.testing.assert_allclose(
        found[split_rows].astype(np.float32),
        wanted[split_rows].astype(np.float32),
        rtol=1e-5 if dtype == "f32" else 1 / 128,
        atol=1e-6,
    )
