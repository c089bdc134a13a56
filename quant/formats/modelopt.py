"""nvidia-modelopt's unified Hugging Face checkpoints, which `trtc quantize` writes too.

Layout (modelopt.torch.export.export_hf_checkpoint, 0.2x to 0.47), N out, K in features:

    quant_algo                 weight          weight_scale    others
    FP8                        F8_E4M3 [N, K]  ()              input_scale ()
    FP8_PER_CHANNEL_PER_TOKEN  F8_E4M3 [N, K]  [N]             (activations: dynamic, a token)
    MXFP8                      F8_E4M3 [N, K]  U8 [N, K/32]    (E8M0; activations: dynamic, a token
                                                               and group, here bf16)
    W8A8_SQ_PER_CHANNEL        I8 [N, K]       [N]             input_scale (), pre_quant_scale [K]
    W8A16                      I8 [N, K]       [N]
    W4A16_AWQ                  U8 [N/2, K]     [N, K/group]    pre_quant_scale [K]
    W4A8_AWQ                   U8 [N/2, K]     [N, K/group]    pre_quant_scale [K], input_scale (),
                                                               weight_scale_2 ()
    NVFP4                      U8 [N, K/2]     F8_E4M3         weight_scale_2 (), input_scale ()
                                               [N, K/16]

A pre_quant_scale that several linears share is folded into the norm before them and then absent.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from trtc.quant.formats.listed import ListedModules
from trtc.quant.formats.nvfp4 import weights_of
from trtc.quant.formats.stored import (
    SCALE_DTYPES,
    StoredTensors,
    as_f32,
    mapping,
    positive_size,
    shown,
    unsupported,
)
from trtc.quant.pack import unpack_row_pairs
from trtc.quant.scheme import (
    DYNAMIC_NOTE,
    SCHEMES,
    CheckpointQuantization,
    QuantizedLinear,
    TensorSource,
)


@dataclass(frozen=True)
class _Algorithm:
    """What one `quant_algo` stores."""

    scheme: str
    stored: str
    """Element type of the weight in the file."""
    input_scale: bool
    dynamic: bool = False
    """Activations are quantised anew for every token."""
    mx_group: int | None = None
    """Input channels that share an E8M0 scale, where the config does not say; activations are
    quantised anew for every token and group, and stay bf16 here."""


_ALGORITHMS: Mapping[str, _Algorithm] = {
    "FP8": _Algorithm("fp8", "F8_E4M3", input_scale=True),
    "FP8_PER_CHANNEL_PER_TOKEN": _Algorithm(
        "fp8_dynamic", "F8_E4M3", input_scale=False, dynamic=True
    ),
    "MXFP8": _Algorithm("fp8_weights", "F8_E4M3", input_scale=False, mx_group=32),
    "W8A8_SQ_PER_CHANNEL": _Algorithm("int8_sq", "I8", input_scale=True),
    "W8A16": _Algorithm("int8_weights", "I8", input_scale=False),
    "W4A16_AWQ": _Algorithm("int4_awq", "U8", input_scale=False),
    "W4A8_AWQ": _Algorithm("w4a8_awq", "U8", input_scale=True),
    "NVFP4": _Algorithm("nvfp4", "U8", input_scale=True),
}
_KV_ALGORITHMS = (None, "FP8")


def read_modelopt(
    config: Mapping[str, Any], tensors: Mapping[str, tuple[str, tuple[int, ...]]]
) -> CheckpointQuantization:
    """Read `hf_quant_config.json`'s "quantization" or config.json's `quantization_config`.

    Raises:
        UnsupportedError: an algorithm that trtc does not know.
        CheckpointError: tensors that are missing or contradict the config.
    """
    name = config.get("quant_algo")
    kv_dtype = _kv_dtype(config)
    stored = StoredTensors(tensors)
    kv_scales = stored.kv_scales() if kv_dtype else {}
    if name is None and kv_dtype is not None:
        return CheckpointQuantization("modelopt", SCHEMES["bf16"], {}, kv_scales, kv_dtype)
    algorithm = _ALGORITHMS.get(name) if isinstance(name, str) else None
    if algorithm is None:
        raise unsupported("quant_algo", name, ", ".join(_ALGORITHMS))
    group_size = _group_size(config, algorithm)
    excluded = ListedModules(config, "exclude_modules", "ignore")
    linears = {}
    for prefix in stored.prefixes("weight"):
        if stored.dtype(f"{prefix}.weight") in SCALE_DTYPES:
            continue
        excluded.check(prefix)
        linears[prefix] = _linear(stored, prefix, algorithm, group_size)
    return CheckpointQuantization(
        source="modelopt",
        scheme=replace(SCHEMES[algorithm.scheme], group_size=group_size),
        linears=linears,
        kv_scales=kv_scales,
        kv_dtype=kv_dtype,
        notes=(DYNAMIC_NOTE,) if algorithm.mx_group else (),
    )


def _kv_dtype(config: Mapping[str, Any]) -> Any:
    algorithm = config.get("kv_cache_quant_algo")
    scheme = mapping(config, "kv_cache_scheme")
    if algorithm is None and scheme:
        is_fp8 = (scheme.get("type"), scheme.get("num_bits")) == ("float", 8)
        algorithm = "FP8" if is_fp8 else shown(scheme)
    if algorithm not in _KV_ALGORITHMS:
        raise unsupported("kv_cache_quant_algo", algorithm, "FP8")
    return "f8e4m3" if algorithm == "FP8" else None


def _group_size(config: Mapping[str, Any], algorithm: _Algorithm) -> int | None:
    if algorithm.mx_group:
        return positive_size("group_size", config.get("group_size", algorithm.mx_group))
    if algorithm.stored != "U8":
        return None
    if config.get("has_zero_point"):
        raise unsupported("has_zero_point", True, "symmetric weights")
    # config.json's copy of the config leaves the group size out: it is the scheme's own then.
    return positive_size(
        "group_size", config.get("group_size", SCHEMES[algorithm.scheme].group_size)
    )


def _linear(
    stored: StoredTensors, prefix: str, algorithm: _Algorithm, group_size: int | None
) -> QuantizedLinear:
    weight = f"{prefix}.weight"
    rows, columns = stored.matrix(weight, algorithm.stored)
    scheme = SCHEMES[algorithm.scheme]
    scale = f"{prefix}.weight_scale"
    if scheme.weight == "f4e2m1":
        assert group_size is not None
        tensors, (rows, columns) = weights_of(stored, prefix, "weight", group_size)
    elif algorithm.mx_group:
        assert group_size is not None
        tensors = {
            "weight": TensorSource((weight,)),
            "weight_scale": stored.exponent_scale(scale, rows, columns, group_size),
        }
    else:
        packed = algorithm.stored == "U8"
        rows = 2 * rows if packed else rows
        tensors = {
            "weight": TensorSource((weight,), unpack_row_pairs if packed else None),
            "weight_scale": stored.group_scale(scale, rows, columns, group_size),
        }
    if algorithm.input_scale:
        tensors["input_scale"] = stored.scalar(f"{prefix}.input_scale")
    if scheme.weight in ("i4_f8", "f4e2m1"):
        tensors["weight_scale_2"] = stored.scalar(f"{prefix}.weight_scale_2")
    pre_scale = f"{prefix}.pre_quant_scale"
    if pre_scale in stored:
        stored.require(pre_scale, SCALE_DTYPES, (columns,))
        tensors["pre_quant_scale"] = TensorSource((pre_scale,), as_f32)
    return QuantizedLinear(
        scheme.weight, tensors, group_size, dynamic=algorithm.dynamic, shape=(rows, columns)
    )
