"""GPTQ checkpoints (AutoGPTQ, GPTQModel): 4 or 8 bits, a scale and a zero point a group.

    qweight  i32 [K * bits/32, N]   packed along K
    qzeros   i32 [G, N * bits/32]   packed along N; format v1 stores the zero point less one
    scales   f16 [G, N]             weight[n, k] = scales[g, n] * (q[k, n] - zero[g, n])
    g_idx    i32 [K]                the group of each k

With `desc_act` the groups are scattered over K. Kernels read them one after the other, so columns
are sorted by their groups, and `column_order` says which input channel each multiplies. `dynamic`
may give some modules other settings (quant/formats/gptq_dynamic.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from trtc.protos.errors import CheckpointError, UnsupportedError
from trtc.quant.formats.awq import transposed_f32
from trtc.quant.formats.gptq_dynamic import DynamicRules
from trtc.quant.formats.group_order import order_of_groups
from trtc.quant.formats.stored import (
    CONFIG_FIELD,
    SCALE_DTYPES,
    Array,
    StoredTensors,
    expect,
    num_groups,
    positive_size,
    unsupported,
)
from trtc.quant.pack import offset_bytes, offset_nibbles, unpack_words
from trtc.quant.scheme import (
    SCHEMES,
    CheckpointQuantization,
    QuantizedLinear,
    Scheme,
    TensorSource,
    WeightFormat,
    mixed,
)

_FORMATS = ("gptq", "gptq_v2")
_SCHEMES = {4: "int4_gptq", 8: "int8_weights"}


@dataclass(frozen=True)
class _Layout:
    bits: int
    group_size: int | None
    """None: one group."""
    symmetric: bool
    zero_offset: int
    """What is added to a stored zero point: 1 in format v1."""
    scattered: bool = False
    """Whether g_idx may have any order."""


def read_gptq(
    config: Mapping[str, Any], tensors: Mapping[str, tuple[str, tuple[int, ...]]]
) -> CheckpointQuantization:
    """Read a `quantization_config` whose `quant_method` is gptq.

    Raises:
        UnsupportedError: another number of bits.
        CheckpointError: tensors that are missing or contradict the config.
    """
    layout = _layout(config)
    rules = DynamicRules(config)
    stored = StoredTensors(tensors)
    layouts = {
        prefix: _overridden(config, own) if (own := rules.overrides(prefix)) else layout
        for prefix in stored.prefixes("qweight")
    }
    schemes = dict.fromkeys(_scheme(one) for one in layouts.values() or (layout,))
    return CheckpointQuantization(
        source="gptq",
        scheme=mixed(list(schemes)),
        linears={prefix: _linear(stored, prefix, one) for prefix, one in layouts.items()},
        kv_scales={},
    )


def _scheme(layout: _Layout) -> Scheme:
    return replace(SCHEMES[_SCHEMES[layout.bits]], group_size=layout.group_size)


def _overridden(config: Mapping[str, Any], settings: Mapping[str, Any]) -> _Layout:
    """The layout of a module with settings of its own."""
    try:
        return _layout({**config, **settings})
    except UnsupportedError as error:
        field = error.field.replace(CONFIG_FIELD, f"{CONFIG_FIELD}.dynamic", 1)
        raise UnsupportedError(error.problem, field=field, remedy=error.remedy) from error


def _layout(config: Mapping[str, Any]) -> _Layout:
    bits = expect(config, "bits", *_SCHEMES)
    symmetric = expect(config, "sym", True, False, default=True)
    if bits == 8 and not symmetric:
        raise unsupported("sym", False, "8 bits only with sym true")
    group_size = config.get("group_size")
    size = None if group_size == -1 else positive_size("group_size", group_size)
    scattered = bool(expect(config, "desc_act", True, False, None)) and size is not None
    name = expect(config, "checkpoint_format", *_FORMATS, default=config.get("format", "gptq"))
    return _Layout(bits, size, symmetric, 1 if name == "gptq" else 0, scattered)


def _linear(stored: StoredTensors, prefix: str, layout: _Layout) -> QuantizedLinear:
    per_word = 32 // layout.bits
    words, rows = stored.matrix(f"{prefix}.qweight", "I32")
    columns = words * per_word
    size = layout.group_size
    groups = 1 if size is None else num_groups(prefix, columns, size)
    stored.require(f"{prefix}.scales", SCALE_DTYPES, (groups, rows))
    stored.require(f"{prefix}.qzeros", ("I32",), (groups, -(-rows // per_word)))
    names: tuple[str, ...] = (f"{prefix}.qweight", f"{prefix}.qzeros")
    index = f"{prefix}.g_idx"
    if layout.scattered or index in stored:
        stored.require(index, ("I32", "I64"), (columns,))
        names += (index,)
    read = partial(_weight, prefix=prefix, layout=layout)
    tensors = {
        "weight": TensorSource(names, read),
        "weight_scale": TensorSource((f"{prefix}.scales",), transposed_f32),
    }
    if layout.scattered and size is not None:
        order = partial(order_of_groups, name=index, group_size=size)
        tensors["column_order"] = TensorSource((index,), order)
    if not layout.symmetric:
        zeros = partial(_zeros, layout=layout, rows=rows)
        tensors["weight_zero"] = TensorSource((f"{prefix}.qzeros",), zeros)
    weight: WeightFormat = "i4" if layout.bits == 4 else "i8"
    return QuantizedLinear(weight, tensors, size, not layout.symmetric, (rows, columns))


def _weight(
    qweight: Array,
    qzeros: Array,
    g_idx: Array | None = None,
    *,
    prefix: str,
    layout: _Layout,
) -> Array:
    """[N, K]: u4 codes, or signed values when the zero point is the middle; groups in order."""
    codes = unpack_words(qweight, layout.bits, axis=0)
    if g_idx is not None:
        codes = codes[_order(g_idx, prefix, layout)]
    codes = np.ascontiguousarray(codes.T)
    rows = len(codes)
    if not layout.symmetric:
        return codes.astype(ml_dtypes.uint4)
    middle = 1 << (layout.bits - 1)
    if not (_stored_zeros(qzeros, layout)[:, :rows] == middle).all():
        raise CheckpointError(
            f"holds zero points other than {middle}, but the config says sym",
            field=f"{prefix}.qzeros",
            remedy='Check "sym" and "checkpoint_format" in quantization_config',
        )
    return offset_nibbles(codes) if layout.bits == 4 else offset_bytes(codes)


def _order(g_idx: Array, prefix: str, layout: _Layout) -> Array:
    """As `order_of_groups`; the columns as they are, where nothing scatters groups."""
    name, columns = f"{prefix}.g_idx", len(g_idx)
    size = layout.group_size or columns
    if not layout.scattered and not np.array_equal(g_idx, np.arange(columns) // size):
        raise CheckpointError(
            "scatters the groups over the input features, and the config says that they are not",
            field=name,
            remedy='Check "desc_act" and "group_size" in quantization_config',
        )
    return order_of_groups(g_idx, name=name, group_size=size)


def _zeros(qzeros: Array, *, layout: _Layout, rows: int) -> Array:
    """[N, G] u4."""
    zeros = _stored_zeros(qzeros, layout)[:, :rows]
    return np.ascontiguousarray(zeros.T).astype(ml_dtypes.uint4)


def _stored_zeros(qzeros: Array, layout: _Layout) -> Array:
    """[G, N] u8; v1 wraps around: a zero point of 0 is stored as the largest code."""
    codes = unpack_words(qzeros, layout.bits, axis=1)
    return (codes + np.uint8(layout.zero_offset)) & np.uint8((1 << layout.bits) - 1)
