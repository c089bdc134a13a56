"""MXFP4 experts as gpt-oss is released, against Transformers, which dequantises them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.support.evaluate import LIMITS, PAGE_SIZE
from tests.support.models import (
    assert_greedy,
    random_prompt,
    tiny_checkpoint,
    transformers_logits,
)
from tests.support.quantized import canonical
from tests.support.steps import Stepper
from trtc.builder.evaluator import Evaluator
from trtc.builder.graph import GraphRequest, build_graph
from trtc.builder.pipeline import build
from trtc.builder.request import BuildRequest
from trtc.builder.source import ModelSource, open_source
from trtc.builder.targets.cpu import CpuTarget
from trtc.plugins.cpu.host import runnable_isas
from trtc.plugins.products import e8m0_values
from trtc.protos.errors import CheckpointError, RequestError, UnsupportedError
from trtc.protos.plan import read_plan
from trtc.quant.formats.mxfp4 import read_mxfp4
from trtc.runtime.engine.probe import Probe

DECLARED = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
"""As openai/gpt-oss-20b has it."""
GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"


def blocks_and_scales(rng: np.random.Generator, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[E, N, K / 32, 16] and [E, N, K / 32] of weights [E, N, K], whose products stay near one."""
    *rows, depth = shape
    blocks = rng.integers(0, 256, (*rows, depth // 32, 16)).astype(np.uint8)
    exponent = 127 - round(np.log2(2.9 * np.sqrt(depth)))
    scales = rng.integers(exponent - 1, exponent + 2, (*rows, depth // 32)).astype(np.uint8)
    return torch.from_numpy(blocks), torch.from_numpy(scales)


def released(directory: Path, **fields: Any) -> Path:
    """A tiny gpt-oss with the tensors of the released ones; `fields` are of its config.json."""
    path = tiny_checkpoint("gpt_oss", directory, "bfloat16")
    stored, rng = load_file(path / "model.safetensors"), np.random.default_rng(3)
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, depth, rows = stored.pop(name).shape
        stored[f"{name}_blocks"], stored[f"{name}_scales"] = blocks_and_scales(
            rng, experts, rows, depth
        )
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config |= {"quantization_config": DECLARED, **fields}
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return released(tmp_path_factory.mktemp("mxfp4"))


def source_of(checkpoint: Path, **options: Any) -> ModelSource:
    return open_source(BuildRequest(str(checkpoint), checkpoint / "engine", **options))


def in_f32(checkpoint: Path) -> Stepper:
    """The evaluator with the weights as they are, and all else in f32."""
    source = source_of(checkpoint, max_seq_len=128)
    request = GraphRequest(
        replace(source.scheme, dtype="f32"), "f32", LIMITS, source.quantization, PAGE_SIZE
    )
    module = build_graph(source.spec, request, source.reader)
    return Stepper(Evaluator(module, source.reader).run, module.kv, scramble=1)


def test_the_reader_gives_what_transformers_dequantises() -> None:
    rng = np.random.default_rng(0)
    blocks = torch.from_numpy(rng.integers(0, 256, (2, 6, 3, 16)).astype(np.uint8))
    scales = torch.from_numpy(rng.integers(100, 150, (2, 6, 3)).astype(np.uint8))
    names = {"blocks": f"{GATE_UP}_blocks", "scales": f"{GATE_UP}_scales"}
    stored = {names["blocks"]: ("U8", (2, 6, 3, 16)), names["scales"]: ("U8", (2, 6, 3))}
    found = read_mxfp4(DECLARED, stored)
    linear = found.linears[GATE_UP]
    assert (found.scheme.name, found.scheme.group_size, linear.shape) == ("mxfp4", 32, (2, 6, 96))
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    for expert in range(2):
        mine = {names["blocks"]: blocks[expert].numpy(), names["scales"]: scales[expert].numpy()}
        tensors = canonical(linear, mine)
        values = tensors["weight"].astype(np.float32) * np.repeat(
            e8m0_values(tensors["weight_scale"]), 32, axis=1
        )
        np.testing.assert_array_equal(values, expected[expert].T.numpy())


def test_logits_and_tokens_are_those_of_transformers(checkpoint: Path) -> None:
    prompt = random_prompt(53, seed=3)
    found = in_f32(checkpoint).prefill(prompt, 23)
    np.testing.assert_allclose(found, transformers_logits(checkpoint, prompt), rtol=0, atol=1e-4)
    short = random_prompt(11, seed=4)
    tokens = in_f32(checkpoint).greedy(short, 32, chunk=7)
    assert_greedy(checkpoint, short, tokens, 32)


def test_the_engine_keeps_four_bits(checkpoint: Path, tmp_path: Path) -> None:
    request = BuildRequest(str(checkpoint), tmp_path / "engine", max_seq_len=64)
    result = build(request, target=CpuTarget(runnable_isas()[:1], optimization="-O0"))
    assert (result.manifest.scheme.name, result.manifest.scheme.source) == ("mxfp4", "mxfp4")
    ids = np.asarray(random_prompt(48, seed=1), np.int32)
    (found,) = Probe(1).logits(result.path, [ids])
    expected = transformers_logits(checkpoint, ids.tolist())
    error = float(np.square(found - expected).sum() / np.square(expected).sum())
    assert error < 2e-3, f"{error:.2e} of the logits' power"
    plan = read_plan(result.path / "plan.json")
    experts = [one for one in plan.weights if one.name.endswith(("gate_up.packed", "down.packed"))]
    assert len(experts) == 6
    for weight in experts:
        assert weight.layout == "packed_f4e2m1"
    # [E, 2I, H] and [E, H, I] of five experts.
    assert sum(one.bytes for one in experts) == 3 * 5 * (192 * 64 + 64 * 96) // 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"_scales": lambda one: one[:, :-1]}, r"_scales.*has shape \[5, 191, 2\] where.*192, 2"),
        ({"_scales": None}, r"_scales.*is missing, though its module is quantised"),
        ({"_blocks": lambda one: one[..., :8]}, r"_blocks.*\[5, 192, 2, 8\], not \[experts, rows"),
        ({"_bias": None}, r"tensors are missing: .*gate_up_proj_bias"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    checkpoint: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        source_of(changed(checkpoint, tmp_path, {f"{GATE_UP}{k}": v for k, v in change.items()}))


def changed(checkpoint: Path, directory: Path, changes: dict[str, Any], **fields: Any) -> Path:
    """A copy in which tensors are changed or, by None, left out; `fields` are of config.json."""
    stored = load_file(checkpoint / "model.safetensors")
    for name, function in changes.items():
        tensor = stored.pop(name)
        if function is not None:
            stored[name] = function(tensor).contiguous()
    path = directory / "changed"
    path.mkdir()
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    config = json.loads((checkpoint / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **fields}))
    return path


def test_sinks_that_are_missing_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    path = changed(checkpoint, tmp_path, {"model.layers.1.self_attn.sinks": None})
    with pytest.raises(CheckpointError, match=r"tensors are missing: model\.layers\.1.*sinks"):
        source_of(path)


def test_another_number_of_experts_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    path = changed(checkpoint, tmp_path, {}, num_local_experts=6)
    with pytest.raises(CheckpointError, match=r"\[5, .*config\.json makes it \[6, "):
        source_of(path)


def test_scales_that_are_nan_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    def with_nan(scales: torch.Tensor) -> torch.Tensor:
        scales[2, 7, 1] = 255
        return scales

    path = changed(checkpoint, tmp_path, {f"{GATE_UP}_scales": with_nan})
    with pytest.raises(CheckpointError, match=r"gate_up_proj_scales: a scale is NaN"):
        build(BuildRequest(str(path), tmp_path / "engine", target="cpu", max_seq_len=32))


def test_another_scheme_is_refused_by_name(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="is fp8, but the checkpoint is quantised as mxfp4"):
        source_of(checkpoint, dtype="fp8")
    plain = tiny_checkpoint("gpt_oss", tmp_path, "bfloat16")
    for scheme in ("fp8", "int4"):
        with pytest.raises(UnsupportedError, match=r"GptOssExperts, which trtc cannot quantise"):
            build(BuildRequest(str(plain), tmp_path / "engine", dtype=scheme, target="cpu"))
