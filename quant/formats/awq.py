"""AutoAWQ's checkpoints, GEMM packing: 4 bits, a scale and a zero point a group.

qweight  i32 [K, N/8]   columns in the order of pack.AWQ_ORDER
qzeros   i32 [G, N/8]   likewise
scales   f16 [G, N]     weight[n, k] = scales[g, n] * (q[k, n] - zero[g, n])
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from trtc.quant.formats.listed import ListedModules
from trtc.quant.formats.stored import (
    SCALE_DTYPES,
    Array,
    StoredTensors,
    expect,
    num_groups,
    positive_size,
    unsupported,
)
from trtc.quant.pack import unpack_awq
from trtc.quant.scheme import SCHEMES, CheckpointQuantization, QuantizedLinear, TensorSource


def read_awq(
    config: Mapping[str, Any], tensors: Mapping[str, tuple[str, tuple[int, ...]]]
) -> CheckpointQuantization:
    """Read a `quantization_config` whose `quant_method` is awq.

    Raises:
        UnsupportedError: another packing or number of bits.
        CheckpointError: tensors that are missing or contradict the config.
    """
    expect(config, "bits", 4, default=config.get("w_bit"))
    version = config.get("version", "gemm")
    if not isinstance(version, str) or version.lower() != "gemm":
        raise unsupported("version", version, "'gemm'")
    group_size = config.get("group_size", config.get("q_group_size"))
    size = None if group_size == -1 else positive_size("group_size", group_size)
    stored = StoredTensors(tensors)
    kept = ListedModules(config, "modules_to_not_convert")
    linears = {}
    for prefix in stored.prefixes("qweight"):
        kept.check(prefix)
        linears[prefix] = _linear(stored, prefix, size)
    return CheckpointQuantization(
        source="awq",
        scheme=replace(
            SCHEMES["int4_awq"],
            group_size=size,
            pre_quant_scale=False,
        ),
        linears=linears,
        kv_scales={},
    )


def _linear(stored: StoredTensors, prefix: str, group_size: int | None) -> QuantizedLinear:
    columns, words = stored.matrix(f"{prefix}.qweight", "I32")
    rows = 8 * words
    groups = 1 if group_size is None else num_groups(prefix, columns, group_size)
    stored.require(f"{prefix}.scales", SCALE_DTYPES, (groups, rows))
    stored.require(f"{prefix}.qzeros", ("I32",), (groups, words))
    return QuantizedLinear(
        weight="i4",
        tensors={
            "weight": TensorSource((f"{prefix}.qweight",), _transposed_codes),
            "weight_scale": TensorSource((f"{prefix}.scales",), transposed_f32),
            "weight_zero": TensorSource((f"{prefix}.qzeros",), _transposed_codes),
        },
        group_size=group_size,
        has_zero_point=True,
        shape=(rows, columns),
    )


def _transposed_codes(words: Array) -> Array:
    return np.ascontiguousarray(unpack_awq(words).T).astype(ml_dtypes.uint4)


def transposed_f32(scales: Array) -> Array:
    return np.ascontiguousarray(scales.astype(np.float32).T)
