"""The CUDA kernels of kv_write and paged_attention, by Triton's interpreter."""

from typing import Any

import numpy as np
import pytest

from tests.support.attention_case import Sequence
from tests.support.attention_launches import KV_SCALES, make_call, part
from tests.support.one_launch_attention import assert_is_reference, attend
from tests.support.triton_kernels import Launch, interpret, needs_triton
from trtc.plugins.kv_write.reference import reference as kv_write_reference
from trtc.plugins.rounding import cast

needs_triton()

from trtc.plugins.attention.tensorrt_tiles import TACTICS  # noqa: E402

MIXED = [Sequence(1, 1), Sequence(37, 1), Sequence(21, 21), Sequence(50, 13), Sequence(5, 0)]
SMALL: dict[str, Any] = {"page_size": 8, "dtype": "f32", "pool": "f32", "out": "f32"}
HALF = {"dtype": "f16", "pool": "f16", "out": "f16"}


@pytest.mark.parametrize("tactic", TACTICS)
@pytest.mark.parametrize(
    "case",
    [
        {"head_dim": 64},
        {"kv_heads": 4, "head_dim": 16, "window": 20},
        {"heads": 6, "head_dim": 80, "softcap": 3.0},
        {"heads": 7, "kv_heads": 1, "head_dim": 96, "window": 9, "softcap": 2.0, **HALF},
        {"heads": 8, "head_dim": 128, **HALF},
        {"heads": 2, "kv_heads": 1, "head_dim": 256, "window": 33},
        {"heads": 10, "kv_heads": 2, "head_dim": 16, "window": 33, "chunked": 1},
        {"head_dim": 64, **HALF, "pool": "f8e4m3", "by": KV_SCALES},
    ],
)
def test_paged_attention_is_its_reference(tactic: int, case: dict[str, Any]) -> None:
    call = make_call(MIXED, **{**SMALL, **case})
    assert_is_reference(call, attend(call, tactic))


@pytest.mark.parametrize("tactic", TACTICS)
def test_a_row_does_not_depend_on_the_rest_of_the_batch(tactic: int) -> None:
    """Bit for bit: alone, in a batch, and cut into chunks."""
    call = make_call(MIXED, head_dim=16, window=12, **SMALL)
    together = attend(call, tactic)
    begin, end = (int(row) for row in call.batch.query_start[3:5])
    for first, last in ((0, end - begin), (0, 5), (5, end - begin)):
        alone = attend(part(call, 3, first, last), tactic)
        assert np.array_equal(alone, together[begin + first : begin + last])


@pytest.mark.parametrize(
    ("dtype", "pool_dtype"), [("f32", "f32"), ("f16", "f16"), ("f16", "f8e4m3")]
)
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(2, 24), (12, 128)])
def test_kv_write_is_its_reference_bit_for_bit(
    dtype: str, pool_dtype: str, kv_heads: int, head_dim: int
) -> None:
    rng = np.random.default_rng(0)
    shape = (5, kv_heads * head_dim)
    k, v = (cast(20 * rng.normal(size=shape).astype(np.float32), dtype) for _ in range(2))
    if pool_dtype == "f8e4m3":
        # The interpreter rounds E4M3 its own way: here the quotients need no rounding, and some
        # saturate. The hardware's rounding is tested on one.
        k, v = (cast(cast(rows * 8, "f8e4m3"), dtype) for rows in (k, v))
    pool = cast(rng.normal(size=(6, 2, 8, kv_heads, head_dim)).astype(np.float32), pool_dtype)
    slots = np.asarray([3, 47, 8, 16, 0], np.int32)
    k_scale, v_scale = np.asarray(0.25, np.float32), np.asarray(2, np.float32)
    if pool_dtype == "f32":
        k_scale, v_scale = np.asarray(0.037, np.float32), np.asarray(0.3, np.float32)
    attributes: dict[str, Any] = {"num_kv_heads": kv_heads, "head_dim": head_dim}
    (expected,) = kv_write_reference(k, v, pool, slots, k_scale, v_scale, **attributes)
    launch = Launch(
        module="kv_write.tensorrt_kernel",
        arguments=({"k": dtype, "pool": pool_dtype}, attributes, 8),
        grid=(len(slots), 1, 1),
        arrays={
            "k": k,
            "v": v,
            "pool": pool,
            "slots": slots,
            "k_scale": k_scale.reshape(1),
            "v_scale": v_scale.reshape(1),
            "pool_out": pool.copy(),
        },
    )
    written = interpret(launch)["pool_out"]
    assert np.array_equal(written.view(np.uint8), expected.view(np.uint8))
