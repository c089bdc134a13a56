"""Calls of rope_kv_write, for the kernel tests of every target."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.support.kernels import KernelCall, assert_close
from tests.support.operands import Array, random_array, scalar
from trtc.plugins.kv_pool import PagedHeads, code_width
from trtc.plugins.registry import REGISTRY
from trtc.plugins.rounding import NUMPY_DTYPES
from trtc.protos.kv import SCALE_BYTES

ROWS, HEADS, KV_HEADS, PAGES = 9, 6, 2, 5


def rope_call(
    rng: np.random.Generator,
    dtype: str,
    pool_dtype: str,
    head_dim: int,
    rotary_dim: int,
    normed: bool,
    page_size: int = 8,
    scaled: bool = False,
    normed_values: bool = False,
    norm_after: bool = False,
) -> KernelCall:
    """q, k and v are columns of one matrix, as a fused linear leaves them."""
    columns = np.cumsum([0, HEADS * head_dim, KV_HEADS * head_dim, KV_HEADS * head_dim])
    qkv = random_array(rng, ROWS, int(columns[-1]), dtype=dtype, spread=2)
    q, k, v = (qkv[:, columns[i] : columns[i + 1]] for i in range(3))
    inputs: dict[str, Any] = {
        "q": q,
        "k": k,
        "v": v,
        "positions": rng.integers(0, 40, ROWS).astype(np.int32),
        "slots": rng.permutation(PAGES * page_size)[:ROWS].astype(np.int32),
        "cos": np.cos(np.outer(np.arange(40), 10.0 ** -np.arange(rotary_dim // 2))),
        "sin": np.sin(np.outer(np.arange(40), 10.0 ** -np.arange(rotary_dim // 2))),
        "pool": _pool(rng, page_size, head_dim, pool_dtype),
    }
    inputs |= {name: inputs[name].astype(np.float32) for name in ("cos", "sin")}
    if normed:
        inputs |= {name: random_array(rng, head_dim) for name in ("q_norm", "k_norm")}
    if normed_values:
        inputs["v_norm"] = random_array(rng, head_dim)
    if scaled:
        inputs["q_scale"] = rng.uniform(0.5, 2, 40).astype(np.float32)
    if pool_dtype == "f8e4m3":
        inputs |= {"k_scale": scalar(0.02), "v_scale": scalar(0.01)}
    attributes: dict[str, int | float | str] = {
        "num_heads": HEADS,
        "num_kv_heads": KV_HEADS,
        "head_dim": head_dim,
        "rotary_dim": rotary_dim,
        "eps": 1e-6,
        "norm_after": int(norm_after),
    }
    return KernelCall(REGISTRY["rope_kv_write"], attributes, inputs)


def _pool(rng: np.random.Generator, page_size: int, head_dim: int, dtype: str) -> Array:
    if dtype in ("i8", "u8"):
        stored = code_width(dtype, head_dim) + SCALE_BYTES["i8"]
        shape = (PAGES, 2, page_size, KV_HEADS, stored)
        return rng.integers(0, 256, shape).astype(np.uint8).view(NUMPY_DTYPES[dtype])
    return random_array(rng, PAGES, 2, page_size, KV_HEADS, head_dim, dtype=dtype)


def grid() -> list[KernelCall]:
    rng = np.random.default_rng(21)
    return [
        rope_call(rng, "f32", "f32", 64, 64, normed=False, page_size=16),
        rope_call(rng, "f32", "bf16", 24, 24, normed=True, scaled=True, normed_values=True),
        rope_call(
            rng, "bf16", "bf16", 96, 72, normed=False, page_size=32, scaled=True
        ),  # partial rotation
        rope_call(rng, "bf16", "bf16", 128, 128, normed=True, page_size=64),
        rope_call(rng, "bf16", "f8e4m3", 512, 512, normed=True, normed_values=True),
        rope_call(rng, "bf16", "f8e4m3", 64, 64, normed=False),
        rope_call(rng, "bf16", "f8e4m3", 16, 4, normed=True),
        rope_call(rng, "f32", "f32", 24, 16, normed=True, norm_after=True),
        rope_call(rng, "bf16", "bf16", 64, 64, normed=True, scaled=True, norm_after=True),
        rope_call(rng, "bf16", "i8", 64, 64, normed=False, page_size=16),
        rope_call(rng, "f32", "i8", 40, 24, normed=True, normed_values=True),
        rope_call(rng, "bf16", "u8", 64, 64, normed=False, page_size=16),
        rope_call(rng, "bf16", "u8", 128, 128, normed=True),
        rope_call(rng, "f32", "u8", 40, 24, normed=True, normed_values=True),
    ]


def assert_rope_close(call: KernelCall, outputs: Mapping[str, Array]) -> None:
    """Queries within the operator's tolerance, keys and normalised values within a step of the
    pool's type; other values and all other slots exactly."""
    expected = call.reference()
    pool, expected_pool = outputs["pool_out"], expected["pool_out"]
    assert_close(call, {"q_out": outputs["q_out"], "pool_out": expected_pool})
    slots = call.inputs["slots"]
    head_dim = int(call.attributes["head_dim"])
    written, wanted_heads, before = (
        PagedHeads(one, head_dim) for one in (pool, expected_pool, call.inputs["pool"])
    )
    found, wanted = written.read(slots), wanted_heads.read(slots)
    if pool.dtype == np.uint8:
        unit = np.abs(wanted).max(axis=-1, keepdims=True) / 8
        assert (np.abs(found - wanted) <= 1.01 * unit).all()
        assert (np.abs(found - wanted) > 0.1 * unit).mean() < 0.01, "few fall to another code"
    else:
        steps = {"float32": 1e-5, "bfloat16": 1 / 64, "float8_e4m3fn": 1 / 8, "int8": 1 / 16}
        step = steps[str(pool.dtype)]
        assert (np.abs(found - wanted) <= step * np.abs(wanted) + step).all()
    if "v_norm" not in call.inputs:
        assert pool[:, 1].tobytes() == expected_pool[:, 1].tobytes()
    pages, offsets = np.divmod(np.setdiff1d(np.arange(PAGES * pool.shape[2]), slots), pool.shape[2])
    assert written.codes[pages, :, offsets].tobytes() == before.codes[pages, :, offsets].tobytes()
    if written.scales is not None and before.scales is not None:
        left, was = (one.scales[pages, :, offsets] for one in (written, before))
        assert left.tobytes() == was.tobytes()
