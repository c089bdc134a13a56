"""What the compressed-tensors library itself writes, against what it says it means."""

from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors import compressors, quantization

from tests.support.quantized import dequantized
from trtc.quant.prequantized import read_quantization

PREFIX = "model.layers.0.mlp.up_proj"
ROWS, COLUMNS = 16, 128
DTYPES = {
    torch.float8_e4m3fn: "F8_E4M3",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.int32: "I32",
    torch.int64: "I64",
}
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("pack-quantized", "Packed", {"num_bits": 4, "strategy": "group", "group_size": 16}),
    (
        "pack-quantized",
        "Packed",
        {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False},
    ),
    ("pack-quantized", "Packed", {"num_bits": 4, "strategy": "channel"}),
    ("pack-quantized", "Packed", {"num_bits": 6, "strategy": "group", "group_size": 128}),
    ("pack-quantized", "Packed", {"num_bits": 8, "strategy": "group", "group_size": 16}),
    ("int-quantized", "Int", {"num_bits": 8, "strategy": "channel"}),
    ("int-quantized", "Int", {"num_bits": 8, "strategy": "tensor"}),
    ("float-quantized", "Float", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    ("float-quantized", "Float", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    (
        "mxfp4-pack-quantized",
        "MXFP4Packed",
        {
            "num_bits": 4,
            "type": "float",
            "strategy": "group",
            "group_size": 32,
            "scale_dtype": torch.uint8,
        },
    ),
    (
        "nvfp4-pack-quantized",
        "NVFP4Packed",
        {
            "num_bits": 4,
            "type": "float",
            "strategy": "tensor_group",
            "group_size": 16,
            "scale_dtype": torch.float8_e4m3fn,
        },
    ),
]


def observed(weights: Any, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Scale and zero point that the library computes for a weight."""
    in_groups = weights.strategy in ("group", "tensor_group")
    size = weights.group_size if in_groups else COLUMNS
    grouped = weight.reshape(ROWS, COLUMNS // size, size)
    low, high = grouped.amin(-1), grouped.amax(-1)
    if weights.strategy == "tensor":
        low, high = low.min().reshape(1), high.max().reshape(1)
    if weights.strategy == "tensor_group":
        whole = quantization.utils.generate_gparam(weight.min(), weight.max())
        scale, zero = quantization.utils.calculate_qparams(low, high, weights, whole)
        found = {"weight_global_scale": whole.reshape(1)}
    else:
        scale, zero = quantization.utils.calculate_qparams(low, high, weights)
        found = {}
    return {"weight_scale": scale, "weight_zero_point": zero, **found}


@pytest.mark.parametrize(("name", "kind", "settings"), CASES)
def test_library(name: str, kind: str, settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    weights = quantization.QuantizationArgs(**settings)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=weights)
    compressor = getattr(
        compressors,
        {
            "Packed": "PackedQuantizationCompressor",
            "MXFP4Packed": "MXFP4PackedCompressor",
            "NVFP4Packed": "NVFP4PackedCompressor",
            "Int": "IntQuantizationCompressor",
            "Float": "FloatQuantizationCompressor",
        }[kind],
    )
    weight = torch.randn(ROWS, COLUMNS)
    state = {"weight": weight, **observed(weights, weight)}
    compressed = compressor.compress(state, scheme)
    meant = compressor.decompress(compressed, scheme)["weight"].double().numpy()

    stored = {f"{PREFIX}.{key}": tensor for key, tensor in compressed.items()}
    config = quantization.QuantizationConfig(
        config_groups={"group_0": scheme}, format=name, ignore=["lm_head"]
    ).model_dump()
    declared = {**config, "quant_method": "compressed-tensors", "format": name}
    declared["config_groups"]["group_0"]["weights"] = weights.model_dump(mode="json")
    headers = {key: (DTYPES[t.dtype], tuple(t.shape)) for key, t in stored.items()}
    found = read_quantization({"quantization_config": declared}, None, headers)
    assert found is not None
    ours = dequantized(found, PREFIX, {key: as_numpy(t) for key, t in stored.items()})
    # What the library gives back of NVFP4 is bf16, and so is the scale that it multiplies by.
    rtol = 2.0**-7 if kind == "NVFP4Packed" else 1e-5
    np.testing.assert_allclose(ours, meant, rtol=rtol, atol=1e-7)


def as_numpy(tensor: torch.Tensor) -> Any:
    import ml_dtypes

    if tensor.dtype == torch.float8_e4m3fn:
        return tensor.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()
