"""Whole steps in Triton's tiles, by its interpreter."""

from typing import Any

import numpy as np
import pytest

from tests.support.attention_case import Sequence
from tests.support.attention_launches import KV_SCALES, make_call, part, run_triton
from tests.support.triton_kernels import INTERPRETED_SM, needs_triton
from trtc.plugins.gpu.lowering import Site, Variant
from trtc.plugins.paged_attention.op import PAGED_ATTENTION
from trtc.plugins.rounding import cast

needs_triton()

MIXED = [Sequence(1, 1), Sequence(37, 1), Sequence(21, 21), Sequence(50, 13), Sequence(5, 0)]
LOWER = "trtc.plugins.paged_attention.cuda:lower"


def lower_for_chunks(site: Site) -> tuple[Variant, ...]:
    """Beside a kernel for sequences with one new token."""
    from trtc.plugins.paged_attention.triton import prefill

    return (Variant(work=(prefill(site, least_new=2),), max_rows=64),)


@pytest.mark.parametrize(
    "case",
    [
        {"head_dim": 64},
        {"heads": 6, "head_dim": 80, "softcap": 3.0},
        {"heads": 7, "kv_heads": 1, "head_dim": 24, "window": 9, "pool": "f8e4m3", "by": KV_SCALES},
        {"heads": 2, "kv_heads": 2, "head_dim": 256, "window": 33, "page_size": 32},
        {"heads": 6, "head_dim": 16, "window": 9, "sinks": True},
        {"heads": 8, "kv_heads": 1, "head_dim": 80, "window": 33, "pool": "i8"},
        {"heads": 8, "kv_heads": 1, "head_dim": 80, "window": 33, "pool": "u8"},
        {"heads": 4, "head_dim": 64, "pool": "u8", "sinks": True},
        {"heads": 10, "head_dim": 16, "window": 9, "chunked": 1},
    ],
)
def test_an_f32_step_is_its_reference(case: dict[str, Any]) -> None:
    call = make_call(MIXED, **{"dtype": "f32", "pool": "f32", "out": "f32", "page_size": 8} | case)
    out = run_triton(call, LOWER, INTERPRETED_SM)
    tolerance = PAGED_ATTENTION.tolerances["f32"]
    np.testing.assert_allclose(
        out, call.expected(), rtol=tolerance.relative, atol=tolerance.absolute
    )


@pytest.mark.parametrize("out", ["bf16", "f8e4m3", "i8"])
def test_results_are_quantised(out: str) -> None:
    """The very bits: with f32 activations only the last rounding could fall otherwise."""
    call = make_call(MIXED, dtype="f32", pool="f32", out=out, head_dim=16)
    found = run_triton(call, LOWER, INTERPRETED_SM)
    scale = call.options["out_scale"][0] if "out_scale" in call.options else np.float32(1)
    expected = cast(call.expected() / scale, out)
    same = found.view(np.uint8) == expected.view(np.uint8)
    assert same.mean() > 0.999, "sums round elsewhere, and rarely to another side"


def test_sequences_with_one_new_token_are_left_to_others() -> None:
    call = make_call(MIXED, dtype="f32", pool="f32", out="f32")
    lower = f"{__name__}:lower_for_chunks"
    out = run_triton(call, lower, INTERPRETED_SM)
    assert (out[:2].view(np.uint8) == 0xFF).all()
    np.testing.assert_allclose(out[2:], call.expected()[2:], rtol=1e-4, atol=1e-5)


def test_a_row_depends_neither_on_its_chunk_nor_on_the_batch() -> None:
    call = make_call(MIXED, dtype="f32", pool="f32", out="f32", head_dim=16)
    together = run_triton(call, LOWER, INTERPRETED_SM)
    begin = int(call.batch.query_start[3])
    for first, last in ((0, 13), (0, 5), (5, 13)):
        found = run_triton(part(call, 3, first, last), LOWER, INTERPRETED_SM)
        assert np.array_equal(found, together[begin + first : begin + last])
