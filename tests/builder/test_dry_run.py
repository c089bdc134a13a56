"""builder/dry_run.py: what a build would make, and what it would refuse."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.builder.test_families import config_of
from tests.support.engines import build_tiny
from tests.support.models import tiny_checkpoint
from trtc.builder.checkpoint.verify import expected_tensors
from trtc.builder.dry_run import DryRun, dry_run
from trtc.builder.families.registry import decoder_spec
from trtc.builder.request import BuildRequest
from trtc.protos.errors import CheckpointError, RequestError, UnsupportedError, UserError

PYLLAMA = Path("examples/models/pyllama")


def of_config(directory: Path, fields: dict[str, Any], **options: Any) -> DryRun:
    (directory / "config.json").write_text(json.dumps(fields))
    model = str(directory / "config.json")
    return dry_run(BuildRequest(model=model, output=directory / "engine", **options))


def reasons(found: DryRun) -> dict[str, str]:
    return {one.target: one.reason for one in found.verdicts}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_its_sizes_are_those_of_the_build(dtype: str, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint("olmo3", tmp_path)
    request = BuildRequest(
        str(checkpoint), tmp_path / "e", dtype=dtype, max_seq_len=128, page_size=8
    )
    found = dry_run(request)
    built = build_tiny(checkpoint, tmp_path / "engine", dtype, exact_weights=True).manifest
    assert found.checked_tensors and found.builds
    assert (found.num_parameters, found.num_layers) == (
        built.model.num_parameters,
        built.model.num_layers,
    )
    assert found.weights == pytest.approx(built.ledger.weights, rel=0.05)
    assert found.kv_of_sequence == built.kv.pages_of_sequence(128) * built.ledger.page
    assert not (tmp_path / "e").exists()


def test_a_budget_that_no_recipe_meets_is_said_by_target() -> None:
    request = BuildRequest(str(PYLLAMA), Path("e"), max_bytes=4_000_000)
    found = dry_run(request)
    assert not found.builds
    assert "smallest engine take 4,4" in reasons(found)["cpu"]
    assert "--max-bytes" in reasons(found)["cuda:sm_90"]
    assert "one format" in reasons(found)["tensorrt:sm_90"]
    assert found.least_weights is not None and 4e6 < found.least_weights < 5e6
    enough = dry_run(BuildRequest(str(PYLLAMA), Path("e"), max_bytes=5_000_000, target="cpu"))
    assert enough.builds and enough.least_weights == found.least_weights


def test_a_budget_for_ranks_that_cannot_share_its_formats_is_said_by_target(tmp_path: Path) -> None:
    config = config_of("qwen3_5_moe")
    found = reasons(of_config(tmp_path, config, tp=2, max_bytes=5_000_000))
    assert "groups of 128 channels" in found["cuda:sm_90"]
    assert "--tp" in found["cuda:sm_90"]


def test_quantised_weights_count_as_calibration_leaves_them() -> None:
    sizes = {
        dtype: dry_run(BuildRequest(str(PYLLAMA), Path("e"), dtype=dtype)).weights
        for dtype in ("bf16", "fp8", "int4_awq")
    }
    linears = sum(
        one.in_features * one.out_features
        for one in decoder_spec(json.loads((PYLLAMA / "config.json").read_text()), 64).linears
    )
    assert sizes["bf16"] - sizes["fp8"] == pytest.approx(linears, rel=0.02)
    assert sizes["fp8"] - sizes["int4_awq"] == pytest.approx(linears / 2, rel=0.15)


def test_a_config_alone_says_what_an_engine_would_be(tmp_path: Path) -> None:
    fields = config_of("granite")
    found = of_config(tmp_path, fields)
    shapes = expected_tensors(decoder_spec(fields, 64))
    assert found.num_parameters == sum(
        shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in shapes.values()
    )
    assert not found.checked_tensors and found.builds
    assert found.architecture == "GraniteForCausalLM" and "logit scale" in found.features
    assert set(reasons(found)) == {"cpu", "cuda:sm_90", "tensorrt:sm_90", "tensorrt-rtx:sm_120"}
    assert set(reasons(found).values()) == {""}
    assert json.loads(found.to_json())["builds"] is True


def test_targets_that_lack_something_name_it(tmp_path: Path) -> None:
    found = reasons(of_config(tmp_path, config_of("lfm2")))
    assert found["cpu"] == "" == found["cuda:sm_90"]
    assert "short convolutions" in found["tensorrt:sm_90"]
    found = reasons(of_config(tmp_path, config_of("llama"), dtype="fp8", target="tensorrt:sm_80"))
    assert "E4M3" in found["tensorrt:sm_80"]
    found = reasons(of_config(tmp_path, config_of("granite_moe_hybrid"), tp=8))
    assert "the number of heads, 4," in found["cuda:sm_90"]
    assert "takes at most 1" in found["cpu"]
    found = reasons(of_config(tmp_path, config_of("granite_moe_hybrid"), tp=2))
    assert found["cuda:sm_90"] == ""
    found = reasons(of_config(tmp_path, config_of("gemma4_e"), tp=2))
    assert found["cuda:sm_90"] == ""


def test_a_gpu_has_room_for_what_the_weights_leave(tmp_path: Path) -> None:
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
    heads = {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128}
    heads["vocab_size"] = 128256
    found = of_config(tmp_path, config_of("llama", **sizes, **heads), dtype="fp8")
    assert found.weights == pytest.approx(72.5e9, rel=0.02)
    assert found.kv_of_token == 80 * 2 * 8 * 128 * 2
    room = found.tokens_beside_weights
    assert room[24] == room[48] == room[80] == 0
    assert room[141] == (int(141e9 * 0.9) - found.weights) // found.kv_of_token


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"architectures": ["T5ForCausalLM"]}, UnsupportedError, "T5ForCausalLM"),
        ({"num_hidden_layers": 10**9}, CheckpointError, "num_hidden_layers"),
        ({"hidden_size": -64}, CheckpointError, "hidden_size"),
        ({"vocab_size": 2**63}, CheckpointError, "vocab_size"),
        ({"rope_parameters": {"rope_type": "spiral"}}, UnsupportedError, "'spiral'"),
    ],
)
def test_what_no_target_builds_is_refused_by_its_field(
    fields: dict[str, Any], error: type[UserError], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message) as caught:
        of_config(tmp_path, config_of("llama", **fields))
    assert "config.json" in caught.value.field


def test_missing_tensors_are_refused(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint("olmo2", tmp_path)
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(CheckpointError, match=r"tensors are missing: model\.layers\.2\."):
        dry_run(BuildRequest(str(checkpoint), tmp_path / "e"))


def test_options_are_checked_as_a_build_does() -> None:
    with pytest.raises(RequestError, match="--page-size"):
        dry_run(BuildRequest(str(PYLLAMA), Path("e"), page_size=7))
