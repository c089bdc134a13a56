"""Calibration with nvidia-modelopt: what is written, read back, says what the model computes."""

import json
import shutil
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.models import (
    MAX_SEQ_LEN,
    VOCAB_SIZE,
    tiny_checkpoint,
)
from tests.support.quantized import canonical, dequantized, headers, taken_apart
from trtc.builder.checkpoint.reader import SafetensorsReader
from trtc.protos.errors import CalibrationError, CheckpointError, UnsupportedError
from trtc.quant.calibrate import _copy_files, quantize_checkpoint
from trtc.quant.calibration_facts import CalibrationFacts
from trtc.quant.calibration_text import TokenSet
from trtc.quant.plain_names import plain_name
from trtc.quant.prequantized import read_quantization
from trtc.quant.scheme import SCHEMES, CheckpointQuantization

DRAFT = Path(__file__).parents[2] / "examples" / "models" / "pyllama-draft"
WIDE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "max_position_embeddings": MAX_SEQ_LEN,
}
"""Sizes that groups of 128 divide."""
LATENT: dict[str, Any] = {
    "moe_intermediate_size": 128,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
}
OVERRIDES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"moe_intermediate_size": 128, "mlp_only_layers": []},
    "gemma2": {"head_dim": 32},
    "lfm2": {"num_hidden_layers": 5},
    "granite_moe_hybrid": {
        "num_hidden_layers": 3,
        "num_local_experts": 0,
        "shared_intermediate_size": 128,
    },
    "nemotron_h": {"num_hidden_layers": ..., "head_dim": 32},
    "nemotron_h_moe": {
        "num_hidden_layers": ...,
        "head_dim": 32,
        "moe_latent_size": 64,
        "moe_intermediate_size": 64,
        "moe_shared_expert_intermediate_size": 64,
    },
    "lfm2_moe": {"moe_intermediate_size": 128, "num_hidden_layers": 4},
    "qwen2_moe": {
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
        "num_hidden_layers": 2,
    },
    "qwen3_next": {
        "linear_value_head_dim": 32,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
    },
    "qwen3_5_moe": {
        "linear_value_head_dim": 32,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
    },
    "gemma4_e": {
        "head_dim": 32,
        "hidden_size_per_layer_input": 128,
        "layer_types": ["full_attention"] * 2,
        "num_kv_shared_layers": 1,
    },
    "gemma4_moe": {"head_dim": 32, "moe_intermediate_size": 128},
    "glm4_moe": {"moe_intermediate_size": 128, "num_hidden_layers": 2},
    "kimi_linear": {
        "layer_types": ["linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "linear_head_dim": 32,
        "moe_intermediate_size": 128,
        "kv_lora_rank": 128,
    },
    "olmo_hybrid": {
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 64,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "minimax_m2": {"intermediate_size": 128},
    "llama4": {"intermediate_size": 128, "intermediate_size_mlp": 128, "num_hidden_layers": 2},
    "olmoe": {"intermediate_size": 128},
    "granite_moe": {"intermediate_size": 128},
    "granite_moe_shared": {"intermediate_size": 128, "shared_intermediate_size": 128},
    "ernie4_5_moe": {"moe_intermediate_size": 128, "num_hidden_layers": 4},
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "mistral4"), LATENT
    ),
    "glm_moe_dsa": {
        **LATENT,
        "mlp_layer_types": ["dense", "sparse"],
        "indexer_types": ["full", "shared"],
    },
    "qwen3_5": {"linear_value_head_dim": 32, "num_hidden_layers": 4},
}
CASES = [
    ("llama_biased", "int8_sq"),
    ("llama_biased", "w4a8_awq"),
    ("gemma2", "int4_awq"),
    ("phi3", "nvfp4"),
    ("qwen3_moe", "int4_awq"),
    ("qwen3_moe", "fp8"),
    ("qwen3_5", "int4_awq"),
    ("kimi_linear", "int4_awq"),
    ("olmo_hybrid", "int4_awq"),
    ("mixtral", "int8_sq"),
    ("deepseek_v32", "int4_awq"),
    ("qwen2_moe", "int8_sq"),
    ("gemma4_e", "int4_awq"),
    ("gemma4_moe", "int4_awq"),
    ("llama4", "int4_awq"),
    ("olmoe", "int4_awq"),
]
HELDOUT = TokenSet("ids", "", (np.random.default_rng(6).integers(3, VOCAB_SIZE, 32, np.int32),))
"""Short: a model need not write its own, and what is measured here are weights."""


@dataclass(frozen=True)
class Quantized:
    source: Path
    output: Path
    facts: CalibrationFacts
    tensors: dict[str, Any]
    quantization: CheckpointQuantization


def calibration_ids(path: Path, tokens: int = 4608) -> Path:
    """Random ids: these checkpoints have no tokenizer, and no text that they would prefer."""
    ids = np.random.default_rng(5).integers(3, VOCAB_SIZE, (tokens // 32, 32))
    path.write_text("\n".join(json.dumps({"token_ids": row.tolist()}) for row in ids))
    return path


def wide_checkpoint(family: str, directory: Path) -> Path:
    return tiny_checkpoint(family, directory, "bfloat16", **{**WIDE, **OVERRIDES.get(family, {})})


def quantized(
    source: Path,
    scheme: str,
    directory: Path,
    calibration: Path | None,
    kv_dtype: Any = "bf16",
    heldout: TokenSet | None = HELDOUT,
) -> Quantized:
    output = directory / "quantized"
    facts = quantize_checkpoint(
        source, SCHEMES[scheme], kv_dtype, calibration, output, lambda message: None, heldout
    )
    tensors = read_tensors(output)
    found = read_quantization(
        json.loads((output / "config.json").read_text()),
        json.loads((output / "hf_quant_config.json").read_text()),
        headers(tensors),
    )
    assert found is not None
    return Quantized(source, output, facts, tensors, found)


def read_tensors(directory: Path) -> dict[str, Any]:
    reader = SafetensorsReader(directory)
    return {name: np.array(reader.read(name)) for name in reader.names}


def effective(tensors: dict[str, Any], weights: dict[str, Any], family: str) -> dict[str, Any]:
    """Each weight as it acts on what the norm before it normalised.

    ModelOpt moves factors between norms and linears; their product it may not change.
    """
    return {
        name: weight * input_norm(tensors, name, family).astype(np.float64)
        for name, weight in weights.items()
    }


def input_norm(tensors: dict[str, Any], linear: str, family: str) -> Any:
    head, _, tail = linear.partition("layers.")
    layer = f"{head}layers.{tail.split('.')[0]}"
    if family == "olmo_hybrid":
        is_read = f"{layer}.attention_layer_norm.weight" in tensors
        part = "attention" if ".linear_attn." in linear else "feedforward"
        if not is_read or linear.endswith(("o_proj", "down_proj")):
            return np.ones(1)
        return tensors[f"{layer}.{part}_layer_norm.weight"]
    if ".in_proj_" in linear or linear.endswith(
        ("q_proj", "k_proj", "v_proj", "qkv_proj", "q_a_proj", "with_mqa")
    ):
        norm = f"{layer}.input_layernorm.weight"
    elif linear.endswith(("q_b_proj", "kv_b_proj")):
        norm = f"{linear.removesuffix('_b_proj')}_a_layernorm.weight"
    elif linear.endswith(
        ("gate_proj", "up_proj", "gate_up_proj", "w1", "w3", ".gate", "expert_gate", ".router")
    ):
        branch = "_2" if family == "gemma4_moe" and ".experts." in linear else ""
        gemma = f"{layer}.pre_feedforward_layernorm{branch}.weight"
        norm = gemma if gemma in tensors else f"{layer}.post_attention_layernorm.weight"
    else:
        return np.ones(1)
    weight = tensors[norm].astype(np.float64)
    return 1.0 + weight if family in ("gemma2", "qwen3_5") else weight


UNQUANTIZED = (
    ".gate.weight",
    ".shared_expert_gate.weight",
    ".router.proj.weight",
    ".router.weight",
    ".kv_b_proj.weight",
    ".in_proj_a.weight",
    ".in_proj_b.weight",
    ".a_proj.weight",
    ".b_proj.weight",
    ".f_a_proj.weight",
    ".f_b_proj.weight",
    ".g_a_proj.weight",
    ".g_b_proj.weight",
)
NOISE = {"fp8": 0.0015, "int8_sq": 0.0005, "int4_awq": 0.03, "w4a8_awq": 0.03, "nvfp4": 0.015}
"""Share of a weight's power: the squares of half a step of each format, with room."""


@pytest.mark.parametrize(("family", "scheme"), CASES)
def test_weights_stand_for_the_originals(family: str, scheme: str, tmp_path: Path) -> None:
    source = wide_checkpoint(family, tmp_path)
    result = quantized(source, scheme, tmp_path, calibration_ids(tmp_path / "ids.jsonl"))
    linears = result.quantization.linears
    original = taken_apart(read_tensors(source))
    assert set(original) <= set(result.tensors)
    measured = {plain_name(e.layer) for e in result.facts.layers}
    assert measured >= {plain_name(n) for n in linears if "expert" not in n}
    assert result.quantization.scheme.name == scheme

    kept = [n.removesuffix(".weight") for n in original if n.endswith(UNQUANTIZED)]
    exact = {n: original[f"{n}.weight"].astype(np.float64) for n in (*linears, *kept)}
    found = {n: result.tensors[f"{n}.weight"].astype(np.float64) for n in kept}
    for name, linear in linears.items():
        tensors = canonical(linear, result.tensors)
        scale = tensors.get("pre_quant_scale", np.ones(1)).astype(np.float64)
        found[name] = dequantized(result.quantization, name, result.tensors) * scale
    found = effective(result.tensors, found, family)
    for name, weight in effective(original, exact, family).items():
        noise = np.square(found[name] - weight).sum() / np.square(weight).sum()
        assert noise < (1e-9 if name in kept else NOISE[scheme]), name


def test_convolutions_are_exported_in_parts_of_q_k_and_v(tmp_path: Path) -> None:
    """As published checkpoints have them; Transformers saves three equal ones."""
    source = wide_checkpoint("olmo_hybrid", tmp_path)
    result = quantized(source, "fp8", tmp_path, calibration_ids(tmp_path / "ids.jsonl"))
    original = read_tensors(source)
    names = [f"model.layers.0.linear_attn.{one}_conv1d.weight" for one in "qkv"]
    assert [len(original[name]) for name in names] == [128, 128, 128]
    assert [len(result.tensors[name]) for name in names] == [64, 64, 256]
    joined = np.concatenate([original[name] for name in names])
    np.testing.assert_array_equal(np.concatenate([result.tensors[n] for n in names]), joined)


def test_canonical_tensors_have_the_declared_form(tmp_path: Path) -> None:
    source = wide_checkpoint("llama_biased", tmp_path)
    result = quantized(source, "w4a8_awq", tmp_path, calibration_ids(tmp_path / "ids.jsonl"))
    linear = result.quantization.linears["model.layers.0.mlp.down_proj"]
    found = canonical(linear, result.tensors)
    assert {name: (str(a.dtype), a.shape) for name, a in found.items()} == {
        "weight": ("int4", (128, 256)),
        "weight_scale": ("float32", (128, 2)),
        "weight_scale_2": ("float32", ()),
        "input_scale": ("float32", ()),
        "pre_quant_scale": ("float32", (256,)),
    }
    assert linear.group_size == 128 and linear.weight == "i4_f8"


@pytest.fixture(scope="module")
def draft_fp8(tmp_path_factory: pytest.TempPathFactory) -> Quantized:
    """By the texts that ship with trtc."""
    directory = tmp_path_factory.mktemp("draft")
    return quantized(DRAFT, "fp8", directory, None, "f8e4m3", None)


def test_bundled_checkpoint_in_fp8(draft_fp8: Quantized) -> None:
    facts, found = draft_fp8.facts, draft_fp8.quantization
    assert (facts.source, facts.tokens) == ("default", 16_384)
    assert len(found.linears) == len(facts.layers) == 2 * 7
    assert found.kv_dtype == "f8e4m3"
    assert sorted(found.kv_scales) == sorted(f"{kv}:{n}" for kv in "kv" for n in range(2))
    assert all(24 < error.sqnr_db < 45 for error in facts.layers)
    assert draft_fp8.tensors["model.embed_tokens.weight"].dtype.name == "bfloat16"


def test_fp8_scales_are_those_of_the_largest_weights(draft_fp8: Quantized) -> None:
    original = read_tensors(DRAFT)
    for name, linear in draft_fp8.quantization.linears.items():
        largest = np.abs(original[f"{name}.weight"].astype(np.float64)).max()
        scale = canonical(linear, draft_fp8.tensors)["weight_scale"]
        np.testing.assert_allclose(scale, largest / 448, rtol=1e-6)


def test_tokenizer_and_generation_settings_are_copied(draft_fp8: Quantized) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (draft_fp8.output / name).read_bytes() == (DRAFT / name).read_bytes()
    modes = {path.stat().st_mode & 0o777 for path in draft_fp8.output.iterdir()}
    assert modes == {0o644}


def test_the_template_for_tools_is_copied(tmp_path: Path) -> None:
    model, output = tmp_path / "model", tmp_path / "output"
    templates = model / "additional_chat_templates"
    templates.mkdir(parents=True)
    (templates / "tool_use.jinja").write_text("{{ tools }}")
    output.mkdir()
    _copy_files(model, output)
    copied = output / "additional_chat_templates" / "tool_use.jinja"
    assert copied.read_text() == "{{ tools }}"


def test_same_inputs_give_the_same_bytes(draft_fp8: Quantized, tmp_path: Path) -> None:
    again = quantized(DRAFT, "fp8", tmp_path, None, "f8e4m3", None)
    assert again.facts == draft_fp8.facts
    names = sorted(path.name for path in draft_fp8.output.iterdir())
    assert sorted(path.name for path in again.output.iterdir()) == names
    for name in names:
        assert (again.output / name).read_bytes() == (draft_fp8.output / name).read_bytes()


def test_what_is_written_names_no_path(draft_fp8: Quantized) -> None:
    for path in draft_fp8.output.glob("*config*.json"):
        assert "/" not in path.read_text().replace("transformers/", "")


def test_nothing_is_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    source = wide_checkpoint("llama", tmp_path)
    capfd.readouterr()
    calibration = calibration_ids(tmp_path / "ids.jsonl")
    quantize_checkpoint(
        source, SCHEMES["fp8"], "bf16", calibration, tmp_path / "out", said.append, HELDOUT
    )
    assert capfd.readouterr() == ("", "")
    assert [phase for phase, _ in groupby(message.split()[0] for message in said)] == [
        "opening",
        "calibrating,",  # which takes so much memory
        "calibrating",
        "writing",
    ]


def test_without_a_tokenizer_the_model_writes_its_own_text(tmp_path: Path) -> None:
    source = wide_checkpoint("llama", tmp_path)
    result = quantized(source, "fp8", tmp_path, None, heldout=None)
    assert result.facts.source == "model"
    assert result.facts.tokens >= 4096


def test_experts_that_text_hardly_reaches_are_named_and_sane(tmp_path: Path) -> None:
    source = wide_checkpoint("mixtral", tmp_path)
    starve(source, layer=1, expert=2)
    result = quantized(source, "fp8", tmp_path, calibration_ids(tmp_path / "ids.jsonl"))
    assert "model.layers.1.mlp.experts.2" in result.facts.starved_experts
    prefix = "model.layers.1.block_sparse_moe.experts"
    scales = {
        expert: float(
            canonical(result.quantization.linears[f"{prefix}.{expert}.w1"], result.tensors)[
                "input_scale"
            ]
        )
        for expert in range(4)
    }
    # Shown every token of the layer, it has the scale of the layer's largest activation.
    assert scales[2] >= max(scales.values()) * 0.999


def starve(checkpoint: Path, layer: int, expert: int) -> None:
    """Make a router never choose an expert."""
    from safetensors.torch import load_file as load
    from safetensors.torch import save_file

    path = checkpoint / "model.safetensors"
    tensors = load(path)
    gate = tensors[f"model.layers.{layer}.block_sparse_moe.gate.weight"]
    norm = tensors[f"model.layers.{layer}.post_attention_layernorm.weight"]
    # One channel is made constant and large by an embedding that every token shares.
    tensors["model.embed_tokens.weight"][:, 0] = 50.0
    norm[0] = 1.0
    gate[:, 0] = 1.0
    gate[expert, 0] = -10.0
    save_file(tensors, path, {"format": "pt"})


REFUSED: list[tuple[str, str, dict[str, Any], str]] = [
    ("llama", "int4_awq", {}, r"q_proj: has 64 input features, no multiple.*group of 128"),
    ("llama", "bf16", {}, "bf16 has nothing to calibrate"),
]


@pytest.mark.parametrize(("family", "scheme", "overrides", "message"), REFUSED)
def test_refused(
    family: str, scheme: str, overrides: dict[str, Any], message: str, tmp_path: Path
) -> None:
    source = tiny_checkpoint(family, tmp_path, "bfloat16", **overrides)
    with pytest.raises(UnsupportedError, match=message):
        quantize_checkpoint(
            source, SCHEMES[scheme], "bf16", None, tmp_path / "out", lambda message: None
        )
    assert not (tmp_path / "out").exists()


def test_quantised_source_is_refused(draft_fp8: Quantized, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"already quantised \(modelopt\)"):
        quantize_checkpoint(
            draft_fp8.output, SCHEMES["fp8"], "bf16", None, tmp_path / "out", lambda message: None
        )


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file as load
    from safetensors.torch import save_file

    source = wide_checkpoint("llama", tmp_path)
    tensors = load(source / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"missing: model\.layers\.1\.mlp\.up_proj\.weight"):
        quantized(source, "fp8", tmp_path, calibration_ids(tmp_path / "ids.jsonl"))


def spoilt(source: Path, directory: Path) -> Path:
    """A copy of a checkpoint with one NaN in a norm."""
    from safetensors.torch import load_file as load
    from safetensors.torch import save_file

    copy = directory / "spoilt"
    shutil.copytree(source, copy)
    tensors = load(copy / "model.safetensors")
    tensors["model.layers.0.post_attention_layernorm.weight"][3] = float("nan")
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    return copy


def test_activations_that_are_nan_are_refused_by_layer(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match=r"layers\.0\.mlp\.gate_proj: .*not finite"):
        quantized(spoilt(DRAFT, tmp_path), "fp8", tmp_path, None)


def test_linear_that_is_never_used_is_refused_by_layer(tmp_path: Path) -> None:
    from safetensors.torch import load_file as load
    from safetensors.torch import save_file

    source = wide_checkpoint("llama", tmp_path)
    tensors = load(source / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"].zero_()
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(CalibrationError, match=r"layers\.1\.mlp\.down_proj: .* seen is 0\.0"):
        quantized(source, "fp8", tmp_path, calibration_ids(tmp_path / "ids.jsonl"))


def test_model_that_cannot_write_its_own_text_is_refused(tmp_path: Path) -> None:
    source = spoilt(wide_checkpoint("llama", tmp_path), tmp_path)
    with pytest.raises(CheckpointError, match="logits that are not finite"):
        quantized(source, "fp8", tmp_path, None)


def test_too_little_text_is_refused_before_calibrating(tmp_path: Path) -> None:
    source = wide_checkpoint("llama", tmp_path)
    with pytest.raises(CalibrationError, match="at least 4096 tokens"):
        quantized(source, "fp8", tmp_path, calibration_ids(tmp_path / "ids.jsonl", 640))


def test_half_precision_source_is_accepted(tmp_path: Path) -> None:
    source = tiny_checkpoint("llama", tmp_path, "float16", **WIDE)
    result = quantized(source, "fp8", tmp_path, calibration_ids(tmp_path / "ids.jsonl"))
    assert result.tensors["model.norm.weight"].dtype.name == "bfloat16"
