"""Sequences with one new token: split.cu and combine.cu on the CPU, thread by thread."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.attention_case import Sequence
from tests.support.attention_launches import KV_SCALES, assert_close, make_call, part, run_cuda
from tests.support.triton_kernels import needs_triton
from trtc.plugins.attention.split_kv import CUDA
from trtc.plugins.gpu.lowering import Launch
from trtc.plugins.paged_attention.op import PAGED_ATTENTION
from trtc.protos.manifest import Limits

needs_triton()

from trtc.plugins.paged_attention import cuda_cpp  # noqa: E402
from trtc.plugins.paged_attention.cuda import lower  # noqa: E402

DECODE = [Sequence(context, 1) for context in (1, 16, 37, 256, 257, 700)]


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize(
    "case",
    [
        {},
        {"pool": "f8e4m3", "head_dim": 128, "by": KV_SCALES, "page_size": 8, "out": "f8e4m3"},
        {"heads": 3, "kv_heads": 3, "head_dim": 80, "window": 100, "softcap": 3.0, "out": "i8"},
        {"heads": 40, "kv_heads": 2, "head_dim": 80, "pool": "f8e4m3", "out": "f32"},
        {"pool": "i8", "head_dim": 128, "page_size": 8},
        {"heads": 40, "kv_heads": 2, "head_dim": 80, "pool": "i8", "window": 100, "out": "f32"},
        {"pool": "u8", "head_dim": 128, "page_size": 8},
        {"heads": 40, "kv_heads": 2, "head_dim": 96, "pool": "u8", "window": 100, "out": "f32"},
        {"pool": "u8", "head_dim": 64, "sinks": True},
        {"heads": 12, "kv_heads": 1, "head_dim": 256, "page_size": 128, "window": 300},
        {"heads": 16, "kv_heads": 2, "sinks": True},
        {"heads": 10, "kv_heads": 2, "window": 300, "chunked": 1},
        {
            "heads": 8,
            "kv_heads": 1,
            "pool": "f8e4m3",
            "by": KV_SCALES,
            "window": 300,
            "sinks": True,
        },
    ],
)
def test_a_decode_step_is_its_reference(case: dict[str, Any], lazy: bool) -> None:
    """Poison in stale rows and pages, and in what kernels before this one have yet to write."""
    call = make_call(DECODE, **case)
    site = call.site(90)
    variant = lower(site)[0]
    assert variant.kind == "decode"
    out = run_cuda(call, site, variant, lazy=lazy)
    rows = np.arange(call.num_tokens)
    assert_close(call, out, rows, weights=2.0**-11 if case.get("pool") == "f8e4m3" else 2.0**-15)
    if not case:
        tolerance = PAGED_ATTENTION.tolerances["bf16"]
        expected = call.expected()
        error = np.abs(out.astype(np.float32) - expected)
        assert (error <= tolerance.absolute + tolerance.relative * np.abs(expected)).all()


@pytest.mark.parametrize(
    ("pool", "heads", "kv_heads", "rows"),
    [
        ("bf16", 32, 8, [96, 128, 512]),
        ("bf16", 8, 2, [384, 512]),
        ("bf16", 64, 2, [192, 256, 512]),
        ("f8e4m3", 32, 8, [64, 128, 512]),
        ("f8e4m3", 16, 16, [32, 64, 512]),
    ],
)
def test_splits_are_longer_where_there_are_enough_programs(
    pool: str, heads: int, kv_heads: int, rows: list[int]
) -> None:
    """Programs of a sequence: for each KV head, and for each 16 of its query heads."""
    case = {"pool": pool, "heads": heads, "kv_heads": kv_heads, "head_dim": 128}
    site = make_call([Sequence(1, 1)], **case).site(90)
    *decodes, every = lower(replace(site, limits=Limits(512, 8192, 8192)))
    assert [one.kind for one in decodes] == ["decode"] * len(decodes)
    assert [one.max_rows for one in decodes] == rows
    shortest = 1 if pool == "bf16" else 2
    splits = [times * shortest for times in (1, 2, 4)][: len(rows)]
    stats = [512 * (32 // length) * heads * 8 for length in splits]
    assert [one.scratch["stats"] for one in decodes] == stats
    assert every.max_rows == 8192
    assert every.scratch == {**decodes[0].scratch, "counter": 4}
    # Where sequences have one split, the second launch has nothing to do but to set a counter.
    seconds = [one.work[1] for one in (*decodes, every)]
    least = [one.least_splits for one in seconds if isinstance(one, Launch)]
    assert least == [*(length + 1 for length in splits), 0]


@pytest.mark.parametrize("pool", ["bf16", "f8e4m3"])
@pytest.mark.parametrize("longer", [1, 2])
def test_a_decode_step_in_longer_splits_is_its_reference(pool: str, longer: int) -> None:
    """Of 512 keys and 1024, in E4M3 twice as many: contexts of one split, just that, and more."""
    call = make_call(
        [Sequence(context, 1) for context in (1, 512, 1024, 1025, 2060)],
        heads=2,
        kv_heads=1,
        head_dim=128,
        pool=pool,
        by=KV_SCALES if pool == "f8e4m3" else {},
    )
    site = replace(call.site(90), limits=Limits(2048, 2064, 2048))
    variant = lower(site)[longer]
    assert variant.kind == "decode"
    weights = 2.0**-11 if pool == "f8e4m3" else 2.0**-15
    assert_close(call, run_cuda(call, site, variant), np.arange(5), weights=weights)


def test_a_sequence_alone_gives_the_same_bits() -> None:
    call = make_call(DECODE)
    site = call.site(90)
    together = run_cuda(call, site, lower(site)[0])
    for sequence in range(len(DECODE)):
        alone = part(call, sequence, 0, 1)
        # The same engine, so the same kernels: limits and page tables are the whole call's.
        found = run_cuda(alone, site, lower(site)[0])
        assert np.array_equal(found[0], together[sequence])


def test_long_contexts_fall_into_a_bounded_number_of_splits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda_cpp, "CUDA", replace(CUDA, max_splits=4))
    call = make_call([Sequence(1100, 1), Sequence(300, 1), Sequence(50, 1)])
    site = call.site(90)
    variant = lower(site)[0]
    assert variant.scratch["stats"] == 5 * 2 * 4 * 8, "sequences, splits, heads, two floats"
    assert_close(call, run_cuda(call, site, variant), np.arange(3), weights=2.0**-15)


def test_a_mixed_step_leaves_other_rows_alone() -> None:
    call = make_call([Sequence(40, 1), Sequence(60, 5), Sequence(9, 0), Sequence(300, 1)])
    site = call.site(90)
    variant = lower(site)[0]
    out = run_cuda(call, site, variant)
    assert_close(call, out, [0, 6], weights=2.0**-15)
    assert (out[1:6].view(np.uint8) == 0xFF).all()
