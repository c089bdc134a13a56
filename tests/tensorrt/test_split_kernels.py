"""The CUDA kernels of attention_split and attention_combine, by Triton's interpreter."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.attention_case import Array, Sequence
from tests.support.attention_launches import KV_SCALES, Attention, dtype_names, make_call, part
from tests.support.one_launch_attention import assert_is_reference, attend, inputs, num_tiles
from tests.support.triton_kernels import Launch, interpret, needs_triton
from trtc.plugins.attention.split_kv import TENSORRT

needs_triton()

from trtc.plugins.attention.tensorrt_tiles import TACTICS  # noqa: E402
from trtc.plugins.attention_combine import tensorrt_kernel as attention_combine  # noqa: E402
from trtc.plugins.attention_split import tensorrt_kernel as attention_split  # noqa: E402

SPLITS = 3
MIXED = [Sequence(1, 1), Sequence(300, 1), Sequence(21, 21), Sequence(5, 0), Sequence(1000, 1)]
SPLIT_ROWS = [1, 23]
SMALL: dict[str, Any] = {
    "head_dim": 16,
    "page_size": 8,
    "dtype": "f32",
    "pool": "f32",
    "out": "f32",
}
HALF = {"dtype": "f16", "pool": "f16", "out": "f16"}


def run_split(call: Attention, tactic: int) -> dict[str, Array]:
    """out, partial and stats, poisoned where the kernel writes nothing."""
    attributes = {**call.attributes, "splits": SPLITS}
    arguments = (dtype_names(call.batch), attributes, call.batch.pool.shape[2], tactic)
    source = attention_split.kernel(*arguments)
    rows = len(call.batch.context_lens) * SPLITS * attributes["num_heads"]
    longest = max(
        len(
            TENSORRT.ranges(
                int(context), attributes["window"], SPLITS, chunked=bool(attributes["chunked"])
            )
        )
        for context in call.batch.context_lens
    )
    launch = Launch(
        module="attention_split.tensorrt_kernel",
        arguments=arguments,
        grid=(num_tiles(call, source), call.num_kv_heads * longest, 1),
        arrays={
            **inputs(call),
            "out": np.full_like(call.batch.q, np.nan),
            "partial": np.full(rows * attributes["head_dim"], np.nan, np.float32),
            "stats": np.full(rows * 2, np.nan, np.float32),
        },
    )
    return interpret(launch)


def run_both(call: Attention, tactic: int) -> Array:
    made, batch = run_split(call, tactic), call.batch
    arguments = (
        {"rows": dtype_names(batch)["q"]},
        {name: call.attributes[name] for name in ("num_heads", "head_dim", "window", "chunked")}
        | {"splits": SPLITS},
        batch.pool.shape[2],
        tactic,
    )
    heads = attention_combine.heads(attention_combine.kernel(*arguments))
    launch = Launch(
        module="attention_combine.tensorrt_kernel",
        arguments=arguments,
        grid=(len(batch.q), -(-call.attributes["num_heads"] // heads), 1),
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


@pytest.mark.parametrize("tactic", TACTICS)
@pytest.mark.parametrize(
    "case",
    [
        {"head_dim": 64},
        {"heads": 9, "kv_heads": 3, "head_dim": 24, "window": 700},
        {"heads": 9, "kv_heads": 3, "head_dim": 24, "window": 330, "chunked": 1},
        {"heads": 7, "kv_heads": 1, "head_dim": 80, "softcap": 3.0, **HALF},
        {"head_dim": 16, **HALF, "pool": "f8e4m3", "by": KV_SCALES},
    ],
)
def test_both_kernels_are_paged_attention(tactic: int, case: dict[str, Any]) -> None:
    call = make_call(MIXED, **{**SMALL, **case})
    assert_is_reference(call, run_both(call, tactic))


@pytest.mark.parametrize("tactic", TACTICS)
@pytest.mark.parametrize("window", [0, 300])
def test_what_is_not_split_has_the_bits_of_paged_attention(tactic: int, window: int) -> None:
    """Short contexts lose nothing, and rows that are split are left to attention_combine."""
    call = make_call(MIXED, window=window, **SMALL)
    made, wanted = run_split(call, tactic), attend(call, tactic)
    others = np.setdiff1d(np.arange(call.num_tokens), SPLIT_ROWS)
    assert np.array_equal(made["out"][others], wanted[others])
    assert np.isnan(made["out"][SPLIT_ROWS]).all()
    stats = made["stats"].reshape(len(MIXED), SPLITS, 4, 2)
    written = np.isfinite(stats).all(axis=(2, 3)).sum(axis=1)
    assert written.tolist() == [0, 2, 0, 0, 2 if window else 3]


def test_a_split_row_does_not_depend_on_the_rest_of_the_batch() -> None:
    """Bit for bit, though a longer neighbour makes the grid and the page table wider."""
    call = make_call(MIXED, **SMALL)
    together = run_both(call, 1)
    alone = part(call, 1, 0, 1)
    table = np.ascontiguousarray(alone.batch.page_table[:, : -(-300 // 8)])
    narrow = replace(alone, batch=replace(alone.batch, page_table=table))
    assert TENSORRT.keys < 300
    assert np.array_equal(run_both(narrow, 1)[0], together[1])
