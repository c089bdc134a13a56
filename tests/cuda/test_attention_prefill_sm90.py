"""Sequences with several new tokens: prefill_sm90.cu on the CPU, thread by thread."""

from typing import Any

import numpy as np
import pytest

from tests.support.attention_case import Sequence
from tests.support.attention_launches import KV_SCALES, assert_close, make_call, part, run_cuda
from tests.support.triton_kernels import needs_triton

needs_triton()

from trtc.plugins.paged_attention import cuda_prefill_sm90  # noqa: E402
from trtc.plugins.paged_attention.cuda import lower  # noqa: E402

MIXED = [
    Sequence(1, 1),
    Sequence(21, 21),
    Sequence(5, 0),
    Sequence(200, 77),
    Sequence(300, 1),
    Sequence(257, 2),
    Sequence(129, 129),
]
NUM_SINGLE = 2


@pytest.fixture(autouse=True)
def programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few of them: idle ones take their time here."""
    monkeypatch.setattr(cuda_prefill_sm90, "PROGRAMS", 3)


def rows_of_chunks() -> list[int]:
    starts = np.cumsum([0, *(one.new for one in MIXED)])
    return [
        row
        for start, one in zip(starts, MIXED, strict=False)
        for row in range(start, start + one.new)
        if one.new > 1
    ]


@pytest.mark.parametrize(
    ("case", "lazy"),
    [
        ({}, True),
        ({"head_dim": 128, "pool": "f8e4m3", "by": KV_SCALES, "page_size": 8}, True),
        ({"heads": 3, "kv_heads": 3, "head_dim": 80, "window": 100, "out": "f8e4m3"}, False),
        ({"heads": 16, "kv_heads": 2, "window": 100, "sinks": True}, False),
        ({"heads": 10, "kv_heads": 2, "window": 90, "chunked": 1}, False),
        (
            {"heads": 2, "kv_heads": 2, "head_dim": 256, "page_size": 128, "softcap": 20.0}
            | {"pool": "f8e4m3", "out": "i8"},
            False,
        ),
    ],
)
def test_a_mixed_step_is_its_reference(case: dict[str, Any], lazy: bool) -> None:
    """One-token sequences by the split kernel, the others in tiles, nothing left out."""
    call = make_call(MIXED, **case)
    site = call.site(90)
    variant = lower(site)[-1]
    assert (variant.kind, len(variant.work)) == ("any", 3)
    out = run_cuda(call, site, variant, lazy=lazy)
    rows = rows_of_chunks()
    single = sorted(set(range(call.num_tokens)) - set(rows))
    assert len(single) == NUM_SINGLE
    e4m3 = case.get("pool") == "f8e4m3"
    assert_close(call, out, rows, weights=2.0**-11 if e4m3 else 2.0**-8)
    assert_close(call, out, single, weights=2.0**-11 if e4m3 else 2.0**-15)


@pytest.mark.parametrize(("window", "chunked"), [(0, 0), (100, 0), (40, 1)])
def test_a_row_depends_neither_on_its_chunk_nor_on_the_batch(window: int, chunked: int) -> None:
    call = make_call(MIXED, window=window, chunked=chunked)
    site = call.site(90)
    variant = lower(site)[-1]
    together = run_cuda(call, site, variant)
    for sequence, first, last in ((6, 0, 129), (6, 0, 57), (6, 57, 129), (3, 5, 77)):
        chunk = part(call, sequence, first, last)
        begin = int(call.batch.query_start[sequence])
        # The same engine, so the same kernels: limits and page tables are the whole call's.
        found = run_cuda(chunk, site, variant)
        assert np.array_equal(found, together[begin + first : begin + last])


@pytest.mark.parametrize("pool", ["bf16", "f8e4m3"])
def test_keys_that_no_window_reaches_may_be_anything(pool: str) -> None:
    """Their pages too: within a page that a window begins in, and in pages before."""
    window, sequence = 45, Sequence(200, 20)
    call = make_call([sequence], window=window, pool=pool)
    site = call.site(90)
    expected = run_cuda(call, site, lower(site)[-1])
    first = sequence.context - sequence.new - window + 1
    page_size = call.batch.pool.shape[2]
    assert first % page_size and first > 2 * page_size
    table = call.batch.page_table[0]
    nan = call.batch.pool.dtype.type(np.nan)
    call.batch.pool[table[: first // page_size]] = nan
    call.batch.pool[table[first // page_size], :, : first % page_size] = nan
    table[: first // page_size] = 1 << 24
    assert np.array_equal(run_cuda(call, site, lower(site)[-1]), expected)


def test_programs_share_the_tiles_whatever_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    call = make_call([Sequence(300, 300), Sequence(70, 70)])
    found = []
    for programs in (1, 5):
        monkeypatch.setattr(cuda_prefill_sm90, "PROGRAMS", programs)
        site = call.site(90)
        found.append(run_cuda(call, site, lower(site)[-1]))
    np.testing.assert_array_equal(found[0], found[1])
    assert_close(call, found[0], np.arange(370), weights=2.0**-8)
