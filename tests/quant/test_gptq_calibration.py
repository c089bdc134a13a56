"""Checkpoints that GPTQ writes: what they stand for, who reads them, and that they are the same
again."""

import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.quant.test_calibrate import (
    HELDOUT,
    calibration_ids,
    read_tensors,
    starve,
    wide_checkpoint,
)
from tests.support.quantized import canonical, dequantized, headers, taken_apart
from tests.support.recipes import in_turn
from trtc.protos.errors import CalibrationError, UnsupportedError
from trtc.quant.calibrate import quantize_checkpoint
from trtc.quant.calibration import CalibrationJob
from trtc.quant.calibration_facts import CalibrationFacts
from trtc.quant.gptq_layers import round_layers
from trtc.quant.layer_source import LayeredModel, WholeModel
from trtc.quant.plain_names import plain_name
from trtc.quant.prequantized import read_quantization
from trtc.quant.recipe import RECIPE_FILE, FormatRecipe, read_recipe
from trtc.quant.reference_model import load_model
from trtc.quant.scheme import SCHEMES, CheckpointQuantization, Gptq
from trtc.quant.side_thread import side_thread
from trtc.quant.site_format import FORMATS, site_of

DRAFT = Path(__file__).parents[2] / "examples" / "models" / "pyllama-draft"
CASES = [
    ("llama_biased", "int4"),
    ("gemma2", "int4_gptq"),
    ("phi3", "int4_g32"),
    ("mixtral", "int4_g64"),
    ("lfm2", "int4_g64"),
    ("granite_moe_hybrid", "int4_g64"),
    ("nemotron_h_moe", "int4_g64"),
    ("granite_moe", "int4"),
    ("kimi_linear", "int4_g32"),
    ("olmo_hybrid", "int4_g32"),
    ("glm_moe_dsa", "int4_gptq"),
    ("gemma4_e", "int4"),
    ("gemma4_moe", "int4"),
    ("qwen3_moe", "iq4"),
]
WITHOUT_JOURNAL = ("gemma4_e", "glm_moe_dsa")
"""Their layers give more than hidden states: keys and values, and the tokens that they selected."""


def written(
    source: Path,
    scheme: str | FormatRecipe,
    output: Path,
    calibration: Path | None,
    kv_dtype: Any = "bf16",
    journal: Path | None = None,
) -> tuple[CalibrationFacts, CheckpointQuantization, dict[str, Any]]:
    wanted = SCHEMES[scheme] if isinstance(scheme, str) else scheme
    facts = quantize_checkpoint(
        source, wanted, kv_dtype, calibration, output, lambda step: None, HELDOUT, journal=journal
    )
    tensors = read_tensors(output)
    config = json.loads((output / "config.json").read_text())
    found = read_quantization(config, None, headers(tensors))
    assert found is not None
    return facts, found, tensors


@pytest.mark.parametrize(("family", "scheme"), CASES)
def test_weights_stand_for_the_originals(family: str, scheme: str, tmp_path: Path) -> None:
    source = wide_checkpoint(family, tmp_path)
    ids = calibration_ids(tmp_path / "ids.jsonl")
    journal = tmp_path / "journal"
    facts, found, tensors = written(source, scheme, tmp_path / "out", ids, journal=journal)
    assert journal.exists() == (family not in WITHOUT_JOURNAL)
    original = taken_apart(read_tensors(source))
    rounded = {f"{prefix}.weight" for prefix in found.linears}
    assert set(tensors) & set(read_tensors(source)) <= set(original)
    assert found.scheme.group_size == SCHEMES[scheme].group_size
    named = {plain_name(one) for one in found.linears if "expert" not in one}
    assert {plain_name(e.layer) for e in facts.layers} >= named
    for name, tensor in original.items():
        if name not in rounded:
            np.testing.assert_array_equal(tensors[name], tensor)
            continue
        exact = tensor.astype(np.float64)
        noise = np.square(dequantized(found, name.removesuffix(".weight"), tensors) - exact).sum()
        assert noise < 0.03 * np.square(exact).sum(), name
    assert any(
        (canonical(one, tensors)["weight_scale"] < 0).any() for one in found.linears.values()
    )


def test_two_formats_of_one_input_are_each_rounded_as_alone(tmp_path: Path) -> None:
    """Rounding overwrites the sums of the inputs."""
    source = wide_checkpoint("llama", tmp_path)
    settings = SCHEMES["int4"].calibration
    assert isinstance(settings, Gptq)
    q, k = (f"model.layers.0.self_attn.{one}_proj" for one in "qk")

    def rounded(**formats: str) -> Any:
        named = {{"q": q, "k": k}[one]: FORMATS[name] for one, name in formats.items()}
        model = LayeredModel(source, "bfloat16")
        job = CalibrationJob(model, source, tmp_path, HELDOUT, HELDOUT, "", lambda step: None)
        with side_thread() as side:
            return next(round_layers(job, named, settings, side)).linears

    both = rounded(q="int4_g32", k="int4_g64")
    for name, alone in ((q, rounded(q="int4_g32")), (k, rounded(k="int4_g64"))):
        same = (both[name].codes == alone[name].codes).float().mean()
        assert same > 0.99  # f32 may tip a tie


def test_what_is_made_of_layers_is_one_behind_at_most(tmp_path: Path) -> None:
    source = wide_checkpoint("llama", tmp_path)
    named = {f"model.layers.{layer}.self_attn.q_proj": FORMATS["int4_g32"] for layer in range(2)}
    job = CalibrationJob(
        *(LayeredModel(source, "bfloat16"), source, tmp_path, HELDOUT, HELDOUT, ""),
        lambda step: None,
    )
    done: list[int] = []

    def make(index: int) -> None:
        time.sleep(0.2)
        done.append(index)

    with side_thread() as side:
        for layer in round_layers(job, named, Gptq(asymmetric=True, sweeps=0), side):
            assert done == list(range(layer.index))
            side.give(partial(make, layer.index))
    assert done == [0, 1]


def test_a_model_that_is_in_memory_whole_gives_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one whose layers are read in turn. Of a bundled checkpoint, with an FP8 KV cache."""
    ids = calibration_ids(tmp_path / "ids.jsonl")
    facts, found, _ = written(DRAFT, "int4", tmp_path / "one", ids, "f8e4m3")
    assert found.kv_dtype == "f8e4m3" and found.kv_scales
    assert all(10 < error.sqnr_db < 45 for error in facts.layers)
    monkeypatch.setattr(
        "trtc.quant.layer_source.LayeredModel", lambda *given: WholeModel(load_model(*given))
    )
    written(DRAFT, "int4", tmp_path / "other", ids, "f8e4m3")
    for path in (tmp_path / "one").iterdir():
        assert (tmp_path / "other" / path.name).read_bytes() == path.read_bytes(), path.name
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "one").iterdir()} == {0o644}


MIXED = FormatRecipe(
    {
        site: FORMATS[name]
        for site, name in in_turn(
            *(2, "int4_g32", "int8", "int4_g128", "fp8"),
            *("int8_g128", "bf16", "int4_g64", "int6_g128"),
        ).items()
    }
)
NOISE = {"int4": 0.03, "int6": 4e-3, "int8": 1e-4, "fp8": 2e-3, "bf16": 0}
"""Of a weight's power, at most, by how a format's name begins."""


def test_every_site_gets_the_format_of_the_recipe(tmp_path: Path) -> None:
    source = wide_checkpoint("llama", tmp_path)
    ids = calibration_ids(tmp_path / "ids.jsonl")
    facts, found, tensors = written(source, MIXED, tmp_path / "out", ids)
    assert facts.formats == MIXED.names
    assert read_recipe(tmp_path / "out" / RECIPE_FILE) == MIXED
    for name, exact in read_tensors(source).items():
        linear = name.removesuffix(".weight")
        if not linear.endswith("_proj"):
            continue
        wanted = MIXED.formats[site_of(linear)]
        if not wanted.is_quantized:
            np.testing.assert_array_equal(tensors[name], exact)
            assert linear not in found.linears
            continue
        stored = found.linears[linear]
        assert (stored.weight, stored.group_size) == (wanted.weight, wanted.group_size), linear
        error = dequantized(found, linear, tensors) - exact.astype(np.float64)
        noise = np.square(error).sum() / np.square(exact.astype(np.float64)).sum()
        assert 0 < noise < NOISE[wanted.name.split("_")[0]], linear


@pytest.mark.parametrize("scheme", ["int4", MIXED], ids=["int4", "mixed"])
def test_transformers_reads_the_same_weights(scheme: str | FormatRecipe, tmp_path: Path) -> None:
    """compressed-tensors' own decompression gives the logits of the weights that trtc reads."""
    source = wide_checkpoint("llama", tmp_path)
    ids = calibration_ids(tmp_path / "ids.jsonl")
    _, found, tensors = written(source, scheme, tmp_path / "out", ids)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32
    )
    ours = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    for prefix in found.linears:
        values = torch.from_numpy(dequantized(found, prefix, tensors)).float()
        ours.get_submodule(prefix).weight.data.copy_(values)
    tokens = torch.arange(3, 35)[None]
    with torch.inference_mode():
        torch.testing.assert_close(theirs(tokens).logits, ours(tokens).logits, rtol=2e-3, atol=2e-3)


def test_experts_that_text_hardly_reaches_are_named_and_sane(tmp_path: Path) -> None:
    source = wide_checkpoint("mixtral", tmp_path)
    starve(source, layer=1, expert=2)
    ids = calibration_ids(tmp_path / "ids.jsonl")
    facts, found, tensors = written(source, "int4", tmp_path / "out", ids)
    assert "model.layers.1.mlp.experts.2" in facts.starved_experts
    original = read_tensors(source)
    for name in ("w1", "w2", "w3"):
        prefix = f"model.layers.1.block_sparse_moe.experts.2.{name}"
        exact = original[f"{prefix}.weight"].astype(np.float64)
        noise = np.square(dequantized(found, prefix, tensors) - exact).sum()
        assert noise < 0.03 * np.square(exact).sum()


def test_kept_linears_stay(tmp_path: Path) -> None:
    source = wide_checkpoint("llama", tmp_path)
    output, keep = tmp_path / "out", ("*.down_proj",)
    ids = calibration_ids(tmp_path / "ids.jsonl")
    facts = quantize_checkpoint(
        source, SCHEMES["int4"], "bf16", ids, output, lambda step: None, HELDOUT, keep
    )
    assert len(facts.kept) == 2 and all(name.endswith("down_proj") for name in facts.kept)
    tensors = read_tensors(output)
    for name in facts.kept:
        np.testing.assert_array_equal(
            tensors[f"{name}.weight"], read_tensors(source)[f"{name}.weight"]
        )


def test_a_linear_that_gets_nan_is_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file as load
    from safetensors.torch import save_file

    source = wide_checkpoint("llama", tmp_path)
    path = source / "model.safetensors"
    tensors = load(path)
    tensors["model.layers.1.post_attention_layernorm.weight"][3] = torch.nan
    save_file(tensors, path, {"format": "pt"})
    ids = calibration_ids(tmp_path / "ids.jsonl")
    with pytest.raises(CalibrationError, match=r"layers\.1\.mlp\.gate_proj: gets activations"):
        quantize_checkpoint(
            source, SCHEMES["int4"], "bf16", ids, tmp_path / "out", lambda step: None, HELDOUT
        )


def test_groups_that_do_not_divide_a_linear_are_refused(tmp_path: Path) -> None:
    from tests.support.models import tiny_checkpoint

    source = tiny_checkpoint("llama", tmp_path, "bfloat16")
    with pytest.raises(UnsupportedError, match=r"64 input features.*group of 128.*int4_g"):
        written(source, "int4", tmp_path / "out", None)
