"""Imported checkpoints, all the way: the engine's logits against Transformers with the weights."""

import json
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.evaluate import stepper
from tests.support.models import VOCAB_SIZE, tiny_checkpoint, transformers_logits
from tests.support.quantized import (
    awq_linear,
    fp8_block_linear,
    gptq_linear,
    mxfp4_linear,
    nvfp4_linear,
    packed_linear,
)
from tests.support.rounded_inputs import rotated, rounded_logits
from trtc.builder.dry_run import dry_run
from trtc.builder.pipeline import build
from trtc.builder.request import BuildRequest
from trtc.builder.source import open_source
from trtc.builder.targets.cpu import CpuTarget
from trtc.plugins.cpu.host import runnable_isas
from trtc.protos.errors import CheckpointError
from trtc.protos.plan import read_plan
from trtc.quant.formats.transforms import declared_rotation
from trtc.runtime.engine.probe import Probe

BLOCK = 32
"""Channels that are rotated together: as many divide all that families have here."""
Linear = Callable[[str, int, int, int], tuple[dict[str, Any], Any]]
"""(prefix, rows, columns, seed) -> stored tensors and the weight that they stand for."""


def channel_linear(prefix: str, rows: int, columns: int, seed: int) -> tuple[dict[str, Any], Any]:
    """compressed-tensors int-quantized: one scale a row."""
    rng = np.random.default_rng(seed)
    weight = rng.integers(-127, 128, (rows, columns)).astype(np.int8)
    scale = rng.uniform(0.5, 1.0, (rows, 1)).astype(np.float32)
    return {f"{prefix}.weight": weight, f"{prefix}.weight_scale": scale}, weight * scale


def rotated_linear(prefix: str, rows: int, columns: int, seed: int) -> tuple[dict[str, Any], Any]:
    """The same, of a weight that was rotated."""
    tensors, weight = channel_linear(prefix, rows, columns, seed)
    return tensors, rotated(torch.from_numpy(weight), BLOCK).numpy()


def float_linear(prefix: str, rows: int, columns: int, seed: int) -> tuple[dict[str, Any], Any]:
    """compressed-tensors float-quantized: one scale a row."""
    rng = np.random.default_rng(seed)
    weight = rng.normal(0, 60, (rows, columns)).astype(ml_dtypes.float8_e4m3fn)
    scale = rng.uniform(0.5, 1.0, (rows, 1)).astype(np.float32)
    return {f"{prefix}.weight": weight, f"{prefix}.weight_scale": scale}, (
        weight.astype(np.float32) * scale
    )


def mx_linear(prefix: str, rows: int, columns: int, seed: int) -> tuple[dict[str, Any], Any]:
    """compressed-tensors mxfp8-quantized: a power of two for each 32 columns."""
    rng = np.random.default_rng(seed)
    weight = rng.normal(0, 60, (rows, columns)).astype(ml_dtypes.float8_e4m3fn)
    scale = 2.0 ** rng.integers(-2, 2, (rows, columns // 32))
    exact = weight.astype(np.float32) * np.repeat(scale, 32, axis=1)
    stored = scale.astype(ml_dtypes.float8_e8m0fnu)
    return {f"{prefix}.weight": weight, f"{prefix}.weight_scale": stored}, exact


def scattered_groups(prefix: str, columns: int) -> Any:
    """The group of each column: gate and up have the same, those of each expert, and so have q and
    k."""
    of_input = re.sub(r"\b(gate|up|q|k)_proj$", "", prefix).encode()
    return np.random.default_rng(zlib.crc32(of_input)).permutation(np.arange(columns) // 64)


def compressed(name: str, weights: dict[str, Any], activations: Any = None) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"symmetric": True, "type": "int", **weights},
                "input_activations": activations,
            }
        },
        "ignore": ["lm_head"],
    }


NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
CASES: dict[str, tuple[dict[str, Any], Linear]] = {
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"},
        lambda p, n, k, s: awq_linear(p, n, k, 32, s),
    ),
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": False, "desc_act": False},
        lambda p, n, k, s: gptq_linear(p, n, k, 64, symmetric=False, seed=s),
    ),
    "gptq_act_order": (
        {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True, "desc_act": True},
        lambda p, n, k, s: gptq_linear(p, n, k, 64, seed=s, g_idx=scattered_groups(p, k)),
    ),
    "gptq_8_bits": (
        {
            "quant_method": "gptq",
            "bits": 8,
            "group_size": 128,
            "sym": True,
            "dynamic": {r"+:.*\.down_proj": {"bits": 4, "group_size": 64}},
        },
        lambda p, n, k, s: (
            gptq_linear(p, n, k, 64, seed=s)
            if p.endswith(".down_proj")
            else gptq_linear(p, n, k, 128, bits=8, seed=s)
        ),
    ),
    "fp8_blocks": (
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
        lambda p, n, k, s: fp8_block_linear(p, n, k, seed=s),
    ),
    "fp8_blocks_e8m0": (
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "scale_fmt": "ue8m0",
        },
        lambda p, n, k, s: fp8_block_linear(p, n, k, seed=s, powers_of_two=True),
    ),
    "packed_in_groups": (
        compressed("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}),
        lambda p, n, k, s: packed_linear(p, n, k, 32, seed=s),
    ),
    "packed_by_channel": (
        compressed("pack-quantized", {"num_bits": 4, "strategy": "channel"}),
        lambda p, n, k, s: packed_linear(p, n, k, None, seed=s),
    ),
    "fp8_dynamic": (
        compressed(
            "float-quantized",
            {"num_bits": 8, "type": "float", "strategy": "channel"},
            {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"},
        ),
        float_linear,
    ),
    "mxfp8": (
        compressed(
            "mxfp8-quantized",
            {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32},
        ),
        mx_linear,
    ),
    "mxfp4": (
        compressed(
            "mxfp4-pack-quantized",
            {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
        ),
        mxfp4_linear,
    ),
    "nvfp4": (
        compressed("nvfp4-pack-quantized", NVFP4, {**NVFP4, "dynamic": "local"}),
        lambda p, n, k, s: nvfp4_linear(p, n, k, seed=s),
    ),
    "nvfp4_weights": (
        compressed("nvfp4-pack-quantized", NVFP4),
        lambda p, n, k, s: nvfp4_linear(p, n, k, seed=s),
    ),
    "nvfp4_modelopt": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
        lambda p, n, k, s: nvfp4_linear(p, n, k, seed=s, modelopt=True),
    ),
    "int8_dynamic": (
        compressed(
            "int-quantized",
            {"num_bits": 8, "strategy": "channel"},
            {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"},
        ),
        channel_linear,
    ),
    "int8_hadamard": (
        compressed(
            "int-quantized",
            {"num_bits": 8, "strategy": "channel"},
            {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"},
        )
        | {"transform_config": declared_rotation(BLOCK, ["lm_head"])},
        rotated_linear,
    ),
}


def quantized_pair(
    name: str,
    directory: Path,
    family: str = "llama",
    linears: str = r".*_proj(_with_mqa)?",
    **fields: Any,
) -> tuple[Path, Path]:
    """A quantised checkpoint and one with the weights that it stands for.

    Args:
        linears: regular expression of those that are quantised.
    """
    declared, make = CASES[name]
    sizes = {"hidden_size": 128, "intermediate_size": 256, **fields}
    source = tiny_checkpoint(family, directory, "bfloat16", **sizes)
    stored = load_file(source / "model.safetensors")
    plain = dict(stored)
    is_quantized = re.compile(rf"{linears}\.weight")
    names = sorted(n.removesuffix(".weight") for n in stored if is_quantized.fullmatch(n))
    for seed, prefix in enumerate(names):
        rows, columns = stored.pop(f"{prefix}.weight").shape
        tensors, weight = make(prefix, rows, columns, seed)
        # Normalised through the scale, so that activations stay near one.
        size = float(1.5 / np.sqrt(columns) / np.std(weight))
        if any(array.dtype == ml_dtypes.float8_e8m0fnu for array in tensors.values()):
            size = float(2.0 ** np.round(np.log2(size)))
        for key, array in tensors.items():
            if "scale" in key:
                array = (array * size).astype(array.dtype)
            stored[key] = as_torch(array)
        factor = rescaled(tensors, size)
        plain[f"{prefix}.weight"] = as_torch(np.asarray(weight * factor, np.float32))
    quantized = write(directory / "quantized", stored, source, declared)
    return quantized, write(directory / "plain", plain, source, None)


def rescaled(tensors: dict[str, Any], size: float) -> Any:
    """What storing the scales times `size` in their own type really multiplies weights by."""
    scales = next(array for key, array in tensors.items() if "scale" in key)
    if scales.dtype.itemsize == 4:
        return size
    return np.mean((scales * size).astype(scales.dtype).astype(float) / scales.astype(float))


def as_torch(array: Any) -> torch.Tensor:
    views = {
        "float8_e4m3fn": (np.uint8, torch.float8_e4m3fn),
        "float8_e8m0fnu": (np.uint8, torch.float8_e8m0fnu),
        "bfloat16": (np.uint16, torch.bfloat16),
    }
    if str(array.dtype) in views:
        raw, dtype = views[str(array.dtype)]
        return torch.from_numpy(np.ascontiguousarray(array).view(raw)).view(dtype)
    return torch.from_numpy(np.ascontiguousarray(array))


def write(directory: Path, tensors: dict[str, torch.Tensor], source: Path, declared: Any) -> Path:
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    if declared is not None:
        config["quantization_config"] = declared
    (directory / "config.json").write_text(json.dumps(config))
    return directory


ROUNDED: dict[str, tuple[torch.dtype, int | None, int]] = {
    "fp8_blocks": (torch.float8_e4m3fn, 128, 0),
    "fp8_blocks_e8m0": (torch.float8_e4m3fn, 128, 0),
    "fp8_dynamic": (torch.float8_e4m3fn, None, 0),
    "int8_dynamic": (torch.int8, None, 0),
    "int8_hadamard": (torch.int8, None, BLOCK),
}
"""What activations are rounded to, and channels that share a scale, and that are rotated."""


@pytest.mark.parametrize("name", CASES)
def test_engine_computes_with_the_weights(name: str, tmp_path: Path) -> None:
    quantized, plain = quantized_pair(name, tmp_path)
    request = BuildRequest(
        str(quantized), tmp_path / "engine", max_seq_len=64, exact_activations=True
    )
    result = build(request, target=CpuTarget(runnable_isas()[:1], optimization="-O0"))
    ids = np.random.default_rng(1).integers(3, VOCAB_SIZE, 48).astype(np.int32)
    (found,) = Probe(1).logits(result.path, [ids])
    expected = expected_logits(name, plain, ids.tolist())
    error = float(np.square(found - expected).sum() / np.square(expected).sum())
    assert error < most_error(name), f"{error:.2e} of the logits' power"
    sources = ("awq", "gptq", "fp8", "compressed-tensors", "modelopt")
    assert result.manifest.scheme.source in sources
    assert not any("anew for every token" in note for note in result.report.notes)


FP4 = ("mxfp4", "nvfp4", "nvfp4_modelopt", "nvfp4_weights")


@pytest.mark.parametrize("name", FP4)
def test_fp4_weights_keep_four_bits(name: str, tmp_path: Path) -> None:
    quantized, plain = quantized_pair(name, tmp_path)
    request = BuildRequest(str(quantized), tmp_path / "engine", max_seq_len=64)
    result = build(request, target=CpuTarget(runnable_isas()[:1], optimization="-O0"))
    assert result.manifest.scheme.name == ("mxfp4_weights" if name == "mxfp4" else "nvfp4_weights")
    weights = read_plan(result.path / "plan.json").weights
    stored = load_file(plain / "model.safetensors")
    size = sum(one.numel() for key, one in stored.items() if key.endswith("_proj.weight"))
    assert sum(one.bytes for one in weights if one.layout == "packed_f4e2m1") == size // 2
    scales = [one for one in weights if "weight_scale" in one.name and one.name.endswith("packed")]
    assert {one.dtype for one in scales} == {"u8"}
    assert sum(one.bytes for one in scales) == size // (32 if name == "mxfp4" else 16)
    # The target makes the lm_head int8.
    others = sum(one.bytes for one in weights if not one.name.startswith("lm_head"))
    head = 2 * stored["lm_head.weight"].numel()
    assert dry_run(request).weights == pytest.approx(others + head, rel=0.05)
    ids = np.random.default_rng(1).integers(3, VOCAB_SIZE, 48).astype(np.int32)
    (found,) = Probe(1).logits(result.path, [ids])
    expected = expected_logits(name, plain, ids.tolist())
    error = float(np.square(found - expected).sum() / np.square(expected).sum())
    assert error < 4e-3, f"{error:.2e} of the logits' power"


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_modelopt", "nvfp4_weights"])
def test_nvfp4_experts_keep_four_bits(name: str, tmp_path: Path) -> None:
    """Gate, up and down of every expert have f32 scales of their own."""
    sizes = {"moe_intermediate_size": 64, "num_hidden_layers": 1, "mlp_only_layers": []}
    quantized, plain = quantized_pair(name, tmp_path, "qwen3_moe", EXPERTS, **sizes)
    request = BuildRequest(str(quantized), tmp_path / "engine", max_seq_len=64, exact_weights=True)
    result = build(request, target=CpuTarget(runnable_isas()[:1], optimization="-O0"))
    assert result.manifest.scheme.name == "nvfp4_weights"
    weights = read_plan(result.path / "plan.json").weights
    stored = load_file(plain / "model.safetensors")
    size = sum(one.numel() for key, one in stored.items() if ".experts." in key)
    assert sum(one.bytes for one in weights if one.layout == "packed_f4e2m1") == size // 2
    scales = [one for one in weights if "experts" in one.name and "scale.packed" in one.name]
    assert {one.dtype for one in scales} == {"u8"}
    assert sum(one.bytes for one in scales) == size // 16
    # The target makes the lm_head int8.
    others = sum(one.bytes for one in weights if not one.name.startswith("lm_head"))
    head = 2 * stored["lm_head.weight"].numel()
    tried = dry_run(request)
    assert tried.weights == pytest.approx(others + head, rel=0.05)
    reasons = {verdict.target: verdict.reason for verdict in tried.verdicts}
    assert reasons["cpu"] == "" == reasons["cuda:sm_90"]
    refused = "" if name == "nvfp4_weights" else "routed experts cannot have FP4 weights"
    assert refused in reasons["tensorrt-rtx:sm_120"]
    assert bool(reasons["tensorrt-rtx:sm_120"]) == bool(refused)
    ids = np.random.default_rng(1).integers(3, VOCAB_SIZE, 48).astype(np.int32)
    (found,) = Probe(1).logits(result.path, [ids])
    expected = expected_logits(name, plain, ids.tolist())
    # By the median token: an undecided router may choose another expert for some.
    errors = np.square(found - expected).sum(axis=1) / np.square(expected).sum(axis=1)
    assert np.median(errors) < 4e-3, f"{np.median(errors):.2e} of the logits' power"


def most_error(name: str) -> float:
    """Share of the logits' power. In bf16 numbers that lie between two codes go to either."""
    return 4e-2 if name in ROUNDED else 2e-3


@pytest.mark.parametrize("name", ROUNDED)
def test_graph_rounds_activations_as_the_checkpoint_says(name: str, tmp_path: Path) -> None:
    """No number of this prompt is so near the middle of two codes that the order of sums counts."""
    quantized, plain = quantized_pair(name, tmp_path)
    source = open_source(BuildRequest(str(quantized), tmp_path / "engine", max_seq_len=64))
    ids = np.random.default_rng(4).integers(3, VOCAB_SIZE, 48).tolist()
    found = stepper(quantized, "fp32", quantization=source.quantization).prefill(ids, 20)
    expected = expected_logits(name, plain, ids)
    error = np.abs(found - expected) / np.abs(expected).max()
    assert np.median(error) < 1e-6 and np.mean(np.square(error)) < 1e-5


@pytest.mark.parametrize("name", [name for name, (_, _, block) in ROUNDED.items() if not block])
def test_targets_of_static_scales_leave_activations_in_bf16(name: str, tmp_path: Path) -> None:
    quantized, _ = quantized_pair(name, tmp_path)
    request = BuildRequest(str(quantized), tmp_path / "engine", max_seq_len=64)
    source = open_source(request).for_target(rounds_rows=False, multiplies_fp4=False)
    assert source.quantization is not None
    assert not any(linear.dynamic for linear in source.quantization.linears.values())
    assert source.scheme.name == ("int8_weights" if name == "int8_dynamic" else "fp8_weights")
    assert "anew for every token" in source.quantization.notes[0]


def expected_logits(name: str, plain: Path, ids: list[int]) -> Any:
    """Of the weights that a checkpoint stands for, with activations rounded as it says; kv_b_proj
    is absorbed, and its input is not rounded."""
    if name not in ROUNDED:
        return transformers_logits(plain, ids, "float32")
    return rounded_logits(plain, ids, *ROUNDED[name], kept="kv_b_proj")


LATENT = {
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "moe_intermediate_size": 128,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
}
"""Of rows that are no multiple of 128: 192 of queries, 144 of latents."""
EXPERTS = r".*\.experts\.\d+\..*_proj"


def assert_built_as_dequantised(name: str, quantized: Path, plain: Path, tmp_path: Path) -> None:
    """The logits of a CPU engine, by the median token: an undecided router may choose another
    expert for some."""
    request = BuildRequest(
        str(quantized), tmp_path / "engine", max_seq_len=64, exact_activations=True
    )
    result = build(request, target=CpuTarget(runnable_isas()[:1], optimization="-O0"))
    ids = np.random.default_rng(1).integers(3, VOCAB_SIZE, 48).astype(np.int32)
    (found,) = Probe(1).logits(result.path, [ids])
    expected = expected_logits(name, plain, ids.tolist())
    errors = np.square(found - expected).sum(axis=1) / np.square(expected).sum(axis=1)
    assert np.median(errors) < most_error(name), f"{np.median(errors):.2e} of the logits' power"


@pytest.mark.parametrize(
    ("name", "linears"),
    [
        ("fp8_blocks", r".*_proj(_with_mqa)?"),
        ("int8_hadamard", r".*_proj(_with_mqa)?"),
        ("gptq_act_order", r".*_proj(_with_mqa)?"),
        ("packed_in_groups", EXPERTS),
        ("mxfp4", EXPERTS),
        ("nvfp4", r".*_proj(_with_mqa)?"),
        ("nvfp4_modelopt", EXPERTS),
    ],
)
def test_deepseek_v3_as_it_is_quantised(name: str, linears: str, tmp_path: Path) -> None:
    """All linears, kv_b_proj among them, as DeepSeek releases them in FP8; or routed experts alone,
    as Kimi-K2-Thinking has them in four bits."""
    quantized, plain = quantized_pair(name, tmp_path, "deepseek_v3", linears, **LATENT)
    assert_built_as_dequantised(name, quantized, plain, tmp_path)


GLM = {
    "num_hidden_layers": 2,
    "mlp_layer_types": ["dense", "dense"],
    "indexer_types": ["full", "shared"],
}


@pytest.mark.parametrize(
    ("name", "family", "fields"),
    [("fp8_blocks", "deepseek_v32", {}), ("fp8_blocks_e8m0", "glm_moe_dsa", GLM)],
)
def test_indexers_as_they_are_quantised(
    name: str, family: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    """wq_b and wk in FP8 as all other linears, and weights_proj as it was."""
    own = {**LATENT, "index_head_dim": 128, "index_topk": 24, **fields}
    linears = r"(?:.*_proj(_with_mqa)?(?<!weights_proj)|.*\.indexer\.w[qk].*)"
    quantized, plain = quantized_pair(name, tmp_path, family, linears, **own)
    assert_built_as_dequantised(name, quantized, plain, tmp_path)


def test_quantised_linear_of_another_size_than_the_config_says(tmp_path: Path) -> None:
    quantized, _ = quantized_pair("awq", tmp_path)
    config = json.loads((quantized / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps({**config, "intermediate_size": 288}))
    with pytest.raises(CheckpointError, match=r"down_proj\.weight is \[128, 256\].*\[128, 288\]"):
        build(BuildRequest(str(quantized), tmp_path / "engine", target="cpu"))
