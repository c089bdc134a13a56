"""The CUDA kernels of attention_split and attention_combine, by Triton's interpreter."""

from typing import Any

import numpy as np
import pytest

from tests.support.attention_case import Array, Batch, Sequence, make_batch
from tests.support.triton_kernels import Launch, interpret, needs_triton
from trtc.plugins.attention_pieces import PIECE_KEYS, pieces
from trtc.plugins.paged_attention.reference import reference as attention_reference

needs_triton()

from trtc.plugins.attention_combine import cuda_one_launch as attention_combine  # noqa: E402
from trtc.plugins.attention_split import cuda_one_launch as attention_split  # noqa: E402
from trtc.plugins.cuda.attention_one_launch import TACTICS, block_q  # noqa: E402
from trtc.plugins.paged_attention import cuda_one_launch as paged_attention  # noqa: E402

PIECES = 3
MIXED = [Sequence(1, 1), Sequence(300, 1), Sequence(21, 21), Sequence(5, 0), Sequence(1000, 1)]
SPLIT_ROWS = [1, 23]
TOLERANCES = {"f32": (1e-5, 1e-4), "f16": (1e-3, 1 / 256)}
NAMES = {np.dtype(np.float32): "f32", np.dtype(np.float16): "f16"}


def types(batch: Batch) -> dict[str, str]:
    return {"q": NAMES[batch.q.dtype], "pool": NAMES.get(batch.pool.dtype, "f8e4m3")}


def inputs(batch: Batch, scales: tuple[float, float]) -> dict[str, Any]:
    return {
        "q": batch.q,
        "pool": batch.pool,
        "query_start": batch.query_start,
        "context_lens": batch.context_lens,
        "page_table": batch.page_table,
        "k_scale": np.asarray([scales[0]], np.float32),
        "v_scale": np.asarray([scales[1]], np.float32),
        "num_sequences": len(batch.context_lens),
        "table_width": batch.page_table.shape[1],
    }


def tiles_of(batch: Batch, source: Any) -> int:
    return len(batch.q) // block_q(source) + len(batch.context_lens)


def run_split(
    batch: Batch, tactic: int, scales: tuple[float, float], attributes: dict[str, Any]
) -> dict[str, Array]:
    """out, partial and stats, poisoned where the kernel writes nothing."""
    arguments = (types(batch), attributes, batch.pool.shape[2], tactic)
    source = attention_split.kernel(*arguments)
    sequences, heads = len(batch.context_lens), attributes["num_heads"]
    rows = sequences * attributes["pieces"] * heads
    longest = max(
        len(pieces(int(context), attributes["window"], attributes["pieces"]))
        for context in batch.context_lens
    )
    launch = Launch(
        module="attention_split.cuda_one_launch",
        arguments=arguments,
        grid=(tiles_of(batch, source), attributes["num_kv_heads"] * longest, 1),
        arrays={
            **inputs(batch, scales),
            "out": np.full_like(batch.q, np.nan),
            "partial": np.full(rows * attributes["head_dim"], np.nan, np.float32),
            "stats": np.full(rows * 2, np.nan, np.float32),
        },
    )
    return interpret(launch)


def run_both(
    batch: Batch, tactic: int, scales: tuple[float, float], attributes: dict[str, Any]
) -> Array:
    made = run_split(batch, tactic, scales, attributes)
    names = ("num_heads", "head_dim", "window", "pieces")
    arguments = (
        {"rows": types(batch)["q"]},
        {name: attributes[name] for name in names},
        batch.pool.shape[2],
        tactic,
    )
    heads = attention_combine.heads(attention_combine.kernel(*arguments))
    launch = Launch(
        module="attention_combine.cuda_one_launch",
        arguments=arguments,
        grid=(len(batch.q), -(-attributes["num_heads"] // heads), 1),
        arrays={
            "rows": made["out"],
            "partial": made["partial"],
            "stats": made["stats"],
            "query_start": batch.query_start,
            "context_lens": batch.context_lens,
            "num_sequences": len(batch.context_lens),
            "out": np.full_like(batch.q, np.nan),
        },
    )
    return interpret(launch)["out"]


def attributes_of(
    heads: int, kv_heads: int, head_dim: int, window: int, softcap: float, dtype: str
) -> dict[str, Any]:
    return {
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "scale": head_dim**-0.5,
        "window": window,
        "softcap": softcap,
        "pieces": PIECES,
        "out_dtype": dtype,
    }


def batch_of(attributes: dict[str, Any], pool_dtype: str, sequences: list[Sequence]) -> Batch:
    shape = {name: attributes[name] for name in ("num_heads", "num_kv_heads", "head_dim")}
    return make_batch(
        sequences, page_size=8, dtype=attributes["out_dtype"], pool_dtype=pool_dtype, **shape
    )


@pytest.mark.parametrize("tactic", TACTICS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "window", "softcap", "dtype", "pool_dtype"),
    [
        (4, 2, 64, 0, 0.0, "f32", "f32"),
        (9, 3, 24, 700, 0.0, "f32", "f32"),
        (7, 1, 80, 0, 3.0, "f16", "f16"),
        (4, 2, 16, 0, 0.0, "f16", "f8e4m3"),
    ],
)
def test_both_kernels_are_paged_attention(
    tactic: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int,
    softcap: float,
    dtype: str,
    pool_dtype: str,
) -> None:
    attributes = attributes_of(heads, kv_heads, head_dim, window, softcap, dtype)
    batch = batch_of(attributes, pool_dtype, MIXED)
    scales = (0.5, 2.0) if pool_dtype == "f8e4m3" else (1.0, 1.0)
    found = run_both(batch, tactic, scales, attributes)
    whole = {name: value for name, value in attributes.items() if name != "pieces"}
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
        **whole,
    )
    absolute, relative = TOLERANCES[dtype]
    np.testing.assert_allclose(
        found.astype(np.float32), expected.astype(np.float32), rtol=relative, atol=absolute
    )


@pytest.mark.parametrize("tactic", TACTICS)
@pytest.mark.parametrize("window", [0, 300])
def test_what_is_not_split_has_the_bits_of_paged_attention(tactic: int, window: int) -> None:
    """Short contexts lose nothing, and rows that are split are left to attention_combine."""
    attributes = attributes_of(4, 2, 16, window, 0.0, "f32")
    batch = batch_of(attributes, "f32", MIXED)
    made = run_split(batch, tactic, (1.0, 1.0), attributes)
    whole = {name: value for name, value in attributes.items() if name != "pieces"}
    arguments = (types(batch), whole, 8, tactic)
    source = paged_attention.kernel(*arguments)
    launch = Launch(
        module="paged_attention.cuda_one_launch",
        arguments=arguments,
        grid=(tiles_of(batch, source), 2, 1),
        arrays={**inputs(batch, (1.0, 1.0)), "out": np.full_like(batch.q, np.nan)},
    )
    wanted = interpret(launch)["out"]
    others = np.setdiff1d(np.arange(len(batch.q)), SPLIT_ROWS)
    assert np.array_equal(made["out"][others], wanted[others])
    assert np.isnan(made["out"][SPLIT_ROWS]).all()
    stats = made["stats"].reshape(len(MIXED), PIECES, 4, 2)
    written = np.isfinite(stats).all(axis=(2, 3)).sum(axis=1)
    assert written.tolist() == [0, 2, 0, 0, 2 if window else 3]


def test_a_split_row_does_not_depend_on_the_rest_of_the_batch() -> None:
    """Bit for bit, though a longer neighbour makes the grid and the page table wider."""
    attributes = attributes_of(4, 2, 16, 0, 0.0, "f32")
    batch = batch_of(attributes, "f32", MIXED)
    together = run_both(batch, 1, (1.0, 1.0), attributes)
    width = -(-300 // 8)
    alone = Batch(
        q=batch.q[1:2],
        pool=batch.pool,
        slots=batch.slots[1:2],
        query_start=np.asarray([0, 1], np.int32),
        context_lens=batch.context_lens[1:2],
        page_table=np.ascontiguousarray(batch.page_table[1:2, :width]),
    )
    assert PIECE_KEYS < 300
    assert np.array_equal(run_both(alone, 1, (1.0, 1.0), attributes)[0], together[1])
