"""The CUDA kernels of kv_write and paged_attention, by Triton's interpreter."""

from typing import Any

import numpy as np
import pytest

from tests.support.attention_case import Batch, Sequence, make_batch
from tests.support.triton_kernels import Launch, interpret, needs_triton
from trtc.plugins.kv_write.reference import reference as kv_write_reference
from trtc.plugins.paged_attention.reference import reference as attention_reference
from trtc.plugins.rounding import cast

needs_triton()

from trtc.plugins.cuda.attention_one_launch import TACTICS, block_q  # noqa: E402
from trtc.plugins.paged_attention import cuda_one_launch as paged_attention  # noqa: E402

MIXED = [Sequence(1, 1), Sequence(37, 1), Sequence(21, 21), Sequence(50, 13), Sequence(5, 0)]
TOLERANCES = {"f32": (1e-5, 1e-4), "f16": (1e-3, 1 / 256), "bf16": (8e-3, 1 / 64)}


def attend(batch: Batch, tactic: int, k_scale: float, v_scale: float, **attributes: Any) -> Any:
    names = {np.dtype(np.float32): "f32", np.dtype(np.float16): "f16"}
    dtypes = {
        "q": names.get(batch.q.dtype, "bf16"),
        "pool": names.get(batch.pool.dtype, "f8e4m3" if batch.pool.itemsize == 1 else "bf16"),
    }
    arguments = (dtypes, attributes, batch.pool.shape[2], tactic)
    rows = block_q(paged_attention.kernel(*arguments))
    tiles = len(batch.q) // rows + len(batch.context_lens)
    launch = Launch(
        module="paged_attention.cuda_one_launch",
        arguments=arguments,
        grid=(tiles, attributes["num_kv_heads"], 1),
        arrays={
            "q": batch.q,
            "pool": batch.pool,
            "query_start": batch.query_start,
            "context_lens": batch.context_lens,
            "page_table": batch.page_table,
            "k_scale": np.asarray([k_scale], np.float32),
            "v_scale": np.asarray([v_scale], np.float32),
            "num_sequences": len(batch.context_lens),
            "table_width": batch.page_table.shape[1],
            "out": np.zeros_like(batch.q),
        },
    )
    return interpret(launch)["out"]


@pytest.mark.parametrize("tactic", TACTICS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "window", "softcap", "dtype", "pool_dtype"),
    [
        (4, 2, 64, 0, 0.0, "f32", "f32"),
        (4, 4, 16, 20, 0.0, "f32", "f32"),
        (6, 2, 80, 0, 3.0, "f32", "f32"),
        (7, 1, 96, 9, 2.0, "f16", "f16"),
        (8, 2, 128, 0, 0.0, "f16", "f16"),
        (2, 1, 256, 33, 0.0, "f32", "f32"),
        (4, 2, 64, 0, 0.0, "f16", "f8e4m3"),
    ],
)
def test_paged_attention_is_its_reference(
    tactic: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int,
    softcap: float,
    dtype: str,
    pool_dtype: str,
) -> None:
    batch = make_batch(
        MIXED,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=8,
        dtype=dtype,
        pool_dtype=pool_dtype,
    )
    attributes = {
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "scale": head_dim**-0.5,
        "window": window,
        "softcap": softcap,
        "out_dtype": dtype,
    }
    scales = (0.5, 2.0) if pool_dtype == "f8e4m3" else (1.0, 1.0)
    found = attend(batch, tactic, *scales, **attributes)
    (expected,) = attention_reference(
        batch.q,
        batch.pool,
        batch.query_start,
        batch.context_lens,
        batch.page_table,
        np.asarray(scales[0], np.float32),
        np.asarray(scales[1], np.float32),
        None,
        None,
        **attributes,
    )
    absolute, relative = TOLERANCES[dtype]
    np.testing.assert_allclose(
        found.astype(np.float32), expected.astype(np.float32), rtol=relative, atol=absolute
    )


@pytest.mark.parametrize("tactic", TACTICS)
def test_a_row_does_not_depend_on_the_rest_of_the_batch(tactic: int) -> None:
    """Bit for bit: alone, in a batch, and cut into chunks."""
    shape: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    batch = make_batch(MIXED, page_size=8, dtype="f32", pool_dtype="f32", **shape)
    attributes = {**shape, "scale": 0.25, "window": 12, "softcap": 0.0, "out_dtype": "f32"}
    together = attend(batch, tactic, 1.0, 1.0, **attributes)
    begin, end = int(batch.query_start[3]), int(batch.query_start[4])
    for first, last in ((begin, end), (begin, begin + 5), (begin + 5, end)):
        part = Batch(
            q=batch.q[first:last],
            pool=batch.pool,
            slots=batch.slots[first:last],
            query_start=np.asarray([0, last - first], np.int32),
            context_lens=batch.context_lens[3:4] - (end - last),
            page_table=batch.page_table[3:4],
        )
        alone = attend(part, tactic, 1.0, 1.0, **attributes)
        assert np.array_equal(alone, together[first:last])


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
        module="kv_write.cuda",
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
