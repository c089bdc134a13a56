"""Checkpoints whose `quant_method` is fp8: Transformers' fine-grained ones and static ones.

    weight            F8_E4M3 [N, K]
    weight_scale_inv  [N/block, K/block]   with `weight_block_size`, a last block of rows may be
                                           shorter; f32, or powers of two as E8M0; activations
                                           quantised anew for every token and group of K
    weight_scale      ()                   without; activations anew for every token, or with
                                           activation_scheme static by
    input_scale       ()

Both scales multiply: value = scale * e4m3, "inv" or not.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trtc.quant.formats.listed import ListedModules
from trtc.quant.formats.stored import (
    StoredTensors,
    block_scale,
    block_size,
    expect,
    unsupported,
)
from trtc.quant.scheme import SCHEMES, CheckpointQuantization, QuantizedLinear, TensorSource

_WEIGHT = "F8_E4M3"


def read_fp8(
    config: Mapping[str, Any], tensors: Mapping[str, tuple[str, tuple[int, ...]]]
) -> CheckpointQuantization:
    """Read a `quantization_config` whose `quant_method` is fp8.

    Raises:
        UnsupportedError: another element type, or blocks that do not divide a linear.
        CheckpointError: tensors that are missing or contradict the config.
    """
    expect(config, "fmt", "e4m3", default="e4m3")
    static = expect(config, "activation_scheme", "static", "dynamic", default="dynamic") == "static"
    block = block_size("weight_block_size", config.get("weight_block_size"))
    if static and block is not None:
        raise unsupported("activation_scheme", "static", "'dynamic' with weight_block_size")
    stored = StoredTensors(tensors)
    kept = ListedModules(config, "modules_to_not_convert", "ignored_layers")
    linears = {}
    for prefix in stored.prefixes("weight"):
        if stored.dtype(f"{prefix}.weight") == _WEIGHT:
            kept.check(prefix)
            linears[prefix] = _linear(stored, prefix, block, static)
    name = "fp8" if static else "fp8_dynamic" if block is None else "fp8_blocks"
    kv_scales = stored.kv_scales()
    return CheckpointQuantization(
        source="fp8",
        scheme=replace(SCHEMES[name], group_size=block[1] if block else None),
        linears=linears,
        kv_scales=kv_scales,
        kv_dtype="f8e4m3" if kv_scales else None,
    )


def _linear(
    stored: StoredTensors, prefix: str, block: tuple[int, int] | None, static: bool
) -> QuantizedLinear:
    rows, columns = stored.matrix(f"{prefix}.weight", _WEIGHT)
    tensors = {"weight": TensorSource((f"{prefix}.weight",))}
    group_size: int | None = None
    if block is None:
        name = f"{prefix}.weight_scale"
        if name not in stored and f"{name}_inv" in stored:
            name = f"{name}_inv"
        tensors["weight_scale"] = stored.group_scale(name, rows, columns, None)
    else:
        tensors["weight_scale"], group_size = block_scale(
            stored, f"{prefix}.weight_scale_inv", rows, columns, block
        )
    if static:
        tensors["input_scale"] = stored.scalar(f"{prefix}.input_scale")
    return QuantizedLinear("f8e4m3", tensors, group_size, dynamic=not static, shape=(rows, columns))
