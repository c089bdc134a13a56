"""The bytes of a pool whose keys and values have scales, against a layout that is written down."""

import numpy as np

from trtc.plugins.kv_pool import PagedHeads

PAGES, PAGE_SIZE, HEADS, HEAD_DIM = 3, 8, 2, 16


def test_codes_of_a_page_come_first_and_their_scales_behind_them() -> None:
    rng = np.random.default_rng(0)
    pool = rng.integers(-128, 128, (PAGES, 2, PAGE_SIZE, HEADS, HEAD_DIM + 4)).astype(np.int8)
    before = pool.copy()
    slots = np.array([9, 0])
    rows = rng.normal(size=(2, HEADS, HEAD_DIM)).astype(np.float32)
    rows[1, 1] = 0
    PagedHeads(pool, HEAD_DIM).write(1, slots, rows)

    changed = np.zeros(pool.size, bool)
    for row, slot in zip(rows, slots.tolist(), strict=True):
        page, offset = divmod(slot, PAGE_SIZE)
        plane = (page * 2 + 1) * PAGE_SIZE * HEADS * (HEAD_DIM + 4)
        for head in range(HEADS):
            first = plane + (offset * HEADS + head) * HEAD_DIM
            at_scale = plane + PAGE_SIZE * HEADS * HEAD_DIM + (offset * HEADS + head) * 4
            codes = pool.reshape(-1)[first : first + HEAD_DIM]
            (scale,) = pool.reshape(-1)[at_scale : at_scale + 4].view(np.float32)
            np.testing.assert_allclose(codes * scale, row[head], atol=np.abs(row[head]).max() / 253)
            assert np.abs(codes).max() == (127 if row[head].any() else 0)
            changed[first : first + HEAD_DIM] = changed[at_scale : at_scale + 4] = True
    assert (pool.reshape(-1)[~changed] == before.reshape(-1)[~changed]).all()


def test_what_is_not_finite_is_not_lost() -> None:
    pool = np.zeros((PAGES, 2, PAGE_SIZE, HEADS, HEAD_DIM + 4), np.int8)
    rows = np.ones((1, HEADS, HEAD_DIM), np.float32)
    rows[0, 0, 3] = np.nan
    heads = PagedHeads(pool, HEAD_DIM)
    heads.write(0, np.array([2]), rows)
    found = heads.read(np.array([2]))
    assert np.isnan(found[0, 0, 0]).all()
    np.testing.assert_allclose(found[0, 0, 1], 1.0)
