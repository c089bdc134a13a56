"""Calls of the row-wise operators, for the kernel tests of every target."""

from typing import Any

import numpy as np

from tests.support.kernels import KernelCall
from tests.support.operands import Array, random_array, scalar
from tests.support.weights import random_weight, stored, stored_groups
from trtc.plugins.iq4 import scales_of
from trtc.plugins.layouts import MOST_IN_PLANES, pack, pack_columns, pack_planes
from trtc.plugins.registry import REGISTRY
from trtc.plugins.rounding import NUMPY_DTYPES
from trtc.plugins.tiles import CHANNELS, tile

ROWS = 7
# A multiple of no vector length; more than one of each; and a real model's.
WIDTHS = (1, 43, 576)
UNEVEN = 43


def epilogue(rng: np.random.Generator, out_dtype: str, width: int) -> dict[str, Array | None]:
    """The scales of a quantised output: both for i8 (SmoothQuant), one for E4M3."""
    return {
        "pre_scale": rng.uniform(0.5, 2, width).astype(np.float32) if out_dtype == "i8" else None,
        "out_scale": scalar(0.03) if out_dtype in ("i8", "f8e4m3") else None,
    }


def rms_norm(rng: np.random.Generator, dtype: str, out_dtype: str, width: int) -> KernelCall:
    residual = out_dtype != "f8e4m3"
    inputs: dict[str, Any] = {
        "x": random_array(rng, ROWS, width, dtype=dtype, spread=3),
        "residual": random_array(rng, ROWS, width, dtype=dtype) if residual else None,
        "weight": random_array(rng, width),
    }
    return KernelCall(
        REGISTRY["rms_norm"],
        {"eps": 1e-5, "out_dtype": out_dtype},
        inputs | epilogue(rng, out_dtype, width),
        optional_outputs=("total",) if residual else (),
    )


def and_normed(call: KernelCall) -> KernelCall:
    """A norm that gives its result unquantised too."""
    return KernelCall(call.op, call.attributes, call.inputs, (*call.optional_outputs, "normed"))


def unquantized(call: KernelCall) -> KernelCall:
    """A norm that gives only what `normed` should be."""
    return KernelCall(
        call.op,
        {**call.attributes, "out_dtype": call.types["x"].dtype, "scales": 0, "hadamard": 0},
        {**call.inputs, "pre_scale": None, "out_scale": None},
        tuple(name for name in call.optional_outputs if name == "total"),
    )


def quantize_of(call: KernelCall, x: Array) -> KernelCall:
    """The quantize of its unquantised result, `x`, that a call does too."""
    of_quantize = ("out_dtype", "scales", "hadamard")
    attributes = {name: call.attributes[name] for name in of_quantize if name in call.attributes}
    scales = {name: call.inputs.get(name) for name in ("pre_scale", "out_scale")}
    outputs = tuple(name for name in call.optional_outputs if name == "row_scale")
    return KernelCall(REGISTRY["quantize"], attributes, {"x": x, **scales}, outputs)


def layer_norm(rng: np.random.Generator, dtype: str, out_dtype: str, width: int) -> KernelCall:
    """With a bias, but for quantised outputs."""
    call = rms_norm(rng, dtype, out_dtype, width)
    bias = random_array(rng, width) if out_dtype == dtype else None
    return KernelCall(
        call.op,
        {**call.attributes, "centered": 1},
        {**call.inputs, "x": call.inputs["x"] + call.inputs["x"].dtype.type(2), "bias": bias},
        call.optional_outputs,
    )


def plain_activation(
    rng: np.random.Generator, dtype: str, out_dtype: str, width: int, activation: str
) -> KernelCall:
    """Of an MLP without a gate."""
    call = swiglu(rng, dtype, out_dtype, width, activation)
    return KernelCall(call.op, call.attributes, {**call.inputs, "up": None})


def swiglu(
    rng: np.random.Generator, dtype: str, out_dtype: str, width: int, activation: str = "silu"
) -> KernelCall:
    fused = random_array(rng, ROWS, 2 * width + 5, dtype=dtype, spread=4)
    inputs = {"gate": fused[:, :width], "up": fused[:, width + 5 :]}
    return KernelCall(
        REGISTRY["swiglu"],
        {"activation": activation, "out_dtype": out_dtype},
        inputs | epilogue(rng, out_dtype, width),
    )


def rms_scale(rng: np.random.Generator, dtype: str, width: int, rows: int = ROWS) -> KernelCall:
    """Of half a row."""
    inputs = {
        "x": random_array(rng, rows, width, dtype=dtype, spread=3),
        "squares": rng.uniform(0, 20 * width, (rows, 1)).astype(np.float32),
        "weight": random_array(rng, width),
    }
    return KernelCall(REGISTRY["rms_scale"], {"width": 2 * width, "eps": 1e-5}, inputs)


def quantize(rng: np.random.Generator, dtype: str, out_dtype: str, width: int) -> KernelCall:
    inputs = {"x": random_array(rng, ROWS, width, dtype=dtype, spread=5)}
    scales = epilogue(rng, out_dtype, width)
    if out_dtype == dtype:  # a plain pre-quantisation scale
        scales["pre_scale"] = rng.uniform(0.5, 2, width).astype(np.float32)
    return KernelCall(REGISTRY["quantize"], {"out_dtype": out_dtype}, inputs | scales)


def into_rows(call: KernelCall, scales: int = 1) -> KernelCall:
    """A call whose result has the scales of its rows instead of out_scale."""
    return KernelCall(
        call.op,
        {**call.attributes, "scales": scales},
        {**call.inputs, "out_scale": None},
        (*call.optional_outputs, "row_scale"),
    )


def by_row(
    rng: np.random.Generator, dtype: str, out_dtype: str, width: int, scales: int = 1
) -> KernelCall:
    """A quantize whose scales follow from x, of which a row is zero."""
    call = quantize(rng, dtype, out_dtype, width)
    x = call.inputs["x"]
    assert x is not None
    x[2] = 0
    return into_rows(call, scales)


def turned(call: KernelCall, block: int) -> KernelCall:
    """Such a quantize after Hadamard matrices."""
    return KernelCall(
        call.op, {**call.attributes, "hadamard": block}, call.inputs, call.optional_outputs
    )


def round_trip(rng: np.random.Generator, dtype: str, width: int, scales: int) -> KernelCall:
    """Such a quantize whose codes are dequantised, for CPU engines alone."""
    call = by_row(rng, dtype, dtype, width, scales)
    return KernelCall(call.op, {**call.attributes, "codes": "f8e4m3"}, call.inputs)


def movers(rng: np.random.Generator, dtype: str, width: int) -> list[KernelCall]:
    x, y = (random_array(rng, ROWS, width, dtype=dtype) for _ in range(2))
    rows = np.array([6, 0, 0, 3], np.int32)
    columns = rng.permutation(width).astype(np.int32)
    fewer = columns[: width - width // 3]
    table = random_array(rng, 11, width, dtype="bf16")
    return [
        KernelCall(REGISTRY["add"], {}, {"x": x, "y": y}),
        KernelCall(REGISTRY["add"], {}, {"x": x, "y": y, "factor": scalar(0.3125)}),
        KernelCall(REGISTRY["gather_columns"], {}, {"x": x, "columns": columns}),
        KernelCall(REGISTRY["gather_columns"], {}, {"x": x, "columns": fewer}),
        KernelCall(REGISTRY["gather_rows"], {}, {"x": x, "rows": rows}),
        lookup_call([10, 0, 4, 4], table, dtype, scale=5.656854),
        lookup_call([10, 0], random_array(rng, 11, width, dtype=dtype), dtype),
    ]


def lookup_call(ids: list[int], table: Array, dtype: str, scale: float = 1.0) -> KernelCall:
    """In a table of floats [V, H]."""
    name = next(one for one in ("f32", "bf16") if table.dtype == NUMPY_DTYPES[one])
    return KernelCall(
        REGISTRY["embedding"],
        {**table_attributes(table, name), "scale": scale, "out_dtype": dtype},
        {"token_ids": np.array(ids, np.int32), "table": table},
    )


def table_attributes(table: Array, weight_dtype: str) -> dict[str, Any]:
    """Of a lookup in a table that is [V, H] before it is stored."""
    return {"V": table.shape[0], "H": table.shape[1], "weight_dtype": weight_dtype}


def layer_inputs(rng: np.random.Generator, dtype: str, width: int) -> KernelCall:
    """Of three layers."""
    return KernelCall(
        REGISTRY["layer_inputs"],
        {"width": width, "eps": 1e-6, "table_scale": 3.25, "scale": 0.7071067811865476},
        {
            "projected": random_array(rng, ROWS, 3 * width, dtype=dtype),
            "token_ids": rng.integers(0, 11, ROWS).astype(np.int32),
            "table": random_array(rng, 11, 3 * width, dtype="bf16"),
            "norm": random_array(rng, width),
        },
    )


def rope(
    rng: np.random.Generator, dtype: str, head_dim: int, rotary_dim: int, norm_after: int = 0
) -> KernelCall:
    angles = np.outer(np.arange(40), 10.0 ** -np.arange(rotary_dim // 2)).astype(np.float32)
    return KernelCall(
        REGISTRY["rope"],
        {
            "num_heads": 3,
            "head_dim": head_dim,
            "rotary_dim": rotary_dim,
            "eps": 1e-6,
            "norm_after": norm_after,
        },
        {
            "q": random_array(rng, ROWS, 3 * head_dim, dtype=dtype),
            "positions": rng.integers(0, 40, ROWS).astype(np.int32),
            "cos": np.cos(angles),
            "sin": np.sin(angles),
            "q_norm": random_array(rng, head_dim) if rotary_dim < head_dim else None,
        },
    )


def int8_tables(rng: np.random.Generator, dtype: str, width: int) -> list[KernelCall]:
    """Lookups in a table whose last panel has 3 rows, as codes, packed and in planes."""
    codes = rng.integers(-128, 128, (35, width)).astype(np.int8)
    scales = rng.uniform(0.5, 1.5, (35, -(-width // 16))).astype(np.float32)
    tables = [
        ("row_major", codes, scales),
        ("packed", pack(codes, "i8"), pack_columns(scales)),
    ]
    if width % 8 == 0:
        within = np.clip(codes, -MOST_IN_PLANES, MOST_IN_PLANES)
        tables.append(("planes", pack_planes(within), pack_columns(scales)))
    return [
        KernelCall(
            REGISTRY["embedding"],
            {
                **table_attributes(codes, "i8"),
                "scale": 2.25,
                "group_size": 16,
                "layout": layout,
                "out_dtype": dtype,
            },
            {
                "token_ids": np.array([34, 0, 17, 17], np.int32),
                "table": table,
                "table_scale": table_scales,
            },
        )
        for layout, table, table_scales in tables
    ]


def iq4_tables(rng: np.random.Generator, dtype: str, width: int) -> list[KernelCall]:
    """The same of 4-bit codes of 32 rows in groups of 32; packed and, where they are whole, in
    tiles."""
    codes = rng.integers(0, 16, (32, width)).astype(NUMPY_DTYPES["u4"])
    scales = rng.integers(0, 256, (32, -(-width // 32))).astype(np.uint8)
    unit = np.exp2(rng.integers(-3, 3, 32)).astype(np.float32)
    tables = [
        ("row_major", codes, scales),
        ("packed", pack(codes, "iq4"), pack_columns(scales)),
    ]
    if width % CHANNELS == 0:
        tables.append(("tiles", tile(codes, CHANNELS), tile(scales, 1)))
    lookups = [
        KernelCall(
            REGISTRY["embedding"],
            {
                **table_attributes(codes, "iq4"),
                "scale": 2.25,
                "group_size": 32,
                "layout": layout,
                "out_dtype": dtype,
            },
            {
                "token_ids": np.array([31, 0, 17, 17], np.int32),
                "table": table,
                "table_scale": table_scales,
                "scale_unit": unit,
            },
        )
        for layout, table, table_scales in tables
    ]
    plain = dict(lookups[0].inputs) | {"scale_unit": None}
    plain["table_scale"] = scales_of(scales, unit[:, None])
    return [*lookups, KernelCall(lookups[0].op, lookups[0].attributes, plain)]


def six_bit_table(
    rng: np.random.Generator, dtype: str, width: int, layout: str = "packed"
) -> KernelCall:
    """A lookup in a table of 35 rows."""
    codes = random_weight(rng, 35, width, dtype="i6")
    scales = rng.uniform(-1.5, 1.5, (35, -(-width // 32))).astype(np.float32)
    return KernelCall(
        REGISTRY["embedding"],
        {
            **table_attributes(codes, "i6"),
            "scale": 2.25,
            "group_size": 32,
            "layout": layout,
            "out_dtype": dtype,
        },
        {
            "token_ids": np.array([34, 0, 17, 17], np.int32),
            "table": stored(codes, "i6", layout),
            "table_scale": stored_groups(scales, layout),
        },
    )


def cpu_grid() -> list[KernelCall]:
    """What only CPU engines have: packed lookups, and dequantised codes."""
    rng = np.random.default_rng(21)
    trips = [round_trip(rng, dtype, 576, 9) for dtype in ("f32", "bf16")]
    return trips + [
        call
        for width in WIDTHS
        for dtype in ("f32", "bf16")
        for call in (*int8_tables(rng, dtype, width), six_bit_table(rng, dtype, width))
    ]


def grid() -> list[KernelCall]:
    rng = np.random.default_rng(20)
    calls = []
    for width in WIDTHS:
        for dtype in ("f32", "bf16"):
            for out_dtype in (dtype, "f8e4m3", "i8"):
                calls += [
                    make(rng, dtype, out_dtype, width) for make in (rms_norm, swiglu, quantize)
                ]
                if out_dtype != dtype:
                    calls.append(by_row(rng, dtype, out_dtype, width))
                    calls.append(and_normed(rms_norm(rng, dtype, out_dtype, width)))
                if out_dtype != dtype and width % 16 == 0:
                    calls.append(by_row(rng, dtype, out_dtype, width, width // 16))
                if out_dtype != dtype and width % 64 == 0:
                    calls.append(turned(by_row(rng, dtype, out_dtype, width), 64))
                    calls.append(turned(by_row(rng, dtype, out_dtype, width, 9), 8))
                if width == UNEVEN:
                    calls.append(layer_norm(rng, dtype, out_dtype, width))
                    calls.append(plain_activation(rng, dtype, out_dtype, width, "relu2"))
            calls.append(swiglu(rng, dtype, dtype, width, "gelu_tanh"))
            calls += movers(rng, dtype, width)
    for dtype in ("f32", "bf16"):
        calls += [layer_inputs(rng, dtype, UNEVEN), rope(rng, dtype, 24, 16)]
        calls += [rope(rng, dtype, 64, 64), rope(rng, dtype, 24, 16, norm_after=1)]
    return calls


def sliced(call: KernelCall, rows: slice) -> KernelCall:
    """The same call over some of its rows."""
    varying = {
        parameter.name for parameter in call.op.inputs if parameter.axes[:1] == ("M",)
    } & set(call.inputs)
    inputs = {
        name: array[rows] if name in varying and array is not None else array
        for name, array in call.inputs.items()
    }
    return KernelCall(call.op, call.attributes, inputs, call.optional_outputs)


def like(call: KernelCall, **arrays: Array) -> KernelCall:
    return KernelCall(call.op, call.attributes, {**call.inputs, **arrays}, call.optional_outputs)
