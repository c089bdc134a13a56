"""A `cuda:` build on a machine without a GPU: measured by the CPU twin, kernels lowered but not
compiled, which `test_*_compile.py` does."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cuda_engines import stand_in_for_compiler
from tests.support.recipes import in_turn, short_text, write_recipe
from tests.support.triton_kernels import needs_triton
from trtc.builder.pipeline import BuildResult, build
from trtc.builder.request import BuildRequest
from trtc.builder.targets import cuda_lowering
from trtc.builder.targets.cuda import CudaTarget
from trtc.protos.errors import AccuracyError, UnsupportedError
from trtc.protos.launch_plan import read_launches
from trtc.protos.manifest import read_manifest
from trtc.protos.plan import read_plan
from trtc.runtime.engine.probe import Probe
from trtc.runtime.integrity.engine_relations import check_plan
from trtc.runtime.integrity.verify import verify_files

needs_triton()

MODEL = Path(__file__).parents[2] / "examples" / "models" / "pyllama-draft"
KEPT = "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module", autouse=True)
def no_compiler() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_lowering, "compile_source", cuda_lowering.compile_source)
        stand_in_for_compiler()
        yield


def built(output: Path, dtype: str | None, **options: Any) -> BuildResult:
    request = BuildRequest(
        model=str(MODEL),
        output=output,
        dtype=dtype,
        max_batch_size=2,
        max_seq_len=256,
        max_num_tokens=32,
        **options,
    )
    return build(request, probe=Probe(1), target=CudaTarget(90))


def weight_dtypes(engine: Path, site: str) -> set[str]:
    calls = read_plan(engine / "plan.json").calls
    return {str(c.attributes["weight_dtype"]) for c in calls if c.site.startswith(site)}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> BuildResult:
    directory = tmp_path_factory.mktemp("cuda")
    text, keep = short_text(directory), (f"{KEPT}=bf16",)
    return built(directory / "engine", "int4", calib=text, max_kl=0.5, eval_tokens=512, keep=keep)


def test_the_manifest_says_what_was_measured_and_on_what(engine: BuildResult) -> None:
    manifest = read_manifest(engine.path)
    verify_files(engine.path, manifest)
    assert (manifest.target.kind, manifest.target.archs) == ("cuda", ("sm_90",))
    accuracy = manifest.accuracy
    assert accuracy is not None and accuracy.kl is not None and accuracy.top1 is not None
    assert 0 < accuracy.kl < 0.5 and 0.6 < accuracy.top1 < 1
    assert accuracy.measured_on.startswith("cpu:") and accuracy.measured_on.endswith(" twin")
    assert accuracy.tokens > 500
    assert accuracy.reference_perplexity == pytest.approx(accuracy.perplexity, rel=0.2)
    assert not any("not measured" in note for note in engine.report.notes)
    assert not list(engine.path.glob("*.so")), "the twin is not a part of the engine"


def test_canaries_come_with_the_margins_that_a_gpu_needs(engine: BuildResult) -> None:
    manifest = engine.manifest
    assert len(manifest.canaries) >= 6 and manifest.canary_tolerance > 0
    for canary in manifest.canaries:
        assert len(canary.margins) == len(canary.token_ids) > 0


def test_steps_of_two_sequences_have_room_for_drafts(engine: BuildResult) -> None:
    step, plan = read_launches(engine.path).step, read_plan(engine.path / "plan.json")
    assert engine.manifest.limits.max_batch_size == 2
    assert step.max_rows == plan.limits.max_batch_size == 16
    check_plan(engine.manifest, plan)
    ends = sorted([*step.offsets.values(), step.num_elements])
    room = {name: ends[ends.index(begin) + 1] - begin for name, begin in step.offsets.items()}
    assert room["context_lens"] >= 16 < 17 <= room["query_start"]
    assert room["page_table"] == 16 * step.table_width
    activations = engine.manifest.ledger.activations
    assert activations == read_launches(engine.path).fixed_bytes(plan.vocab_size)
    assert activations > 4 * 16 * plan.vocab_size


def test_linears_are_kept_in_bf16(engine: BuildResult) -> None:
    manifest = engine.manifest
    assert manifest.scheme.kept == (KEPT,)
    assert weight_dtypes(engine.path, "layers.1.mlp.down") == {"bf16"}
    assert weight_dtypes(engine.path, "layers.0.mlp.down") == {"i4"}
    assert manifest.accuracy is not None
    layers = {error.layer for error in manifest.accuracy.layers}
    assert KEPT not in layers and KEPT.replace("layers.1", "layers.0") in layers


def test_every_site_has_the_format_of_the_recipe(tmp_path: Path) -> None:
    by_hand = in_turn(2, "int4_g128", "int8_g128", "iq4", "fp8", "int8", "bf16", "int6_g128")
    recipe = write_recipe(tmp_path / "recipe.json", by_hand)
    text = short_text(tmp_path)
    result = built(tmp_path / "engine", None, recipe=recipe, calib=text, eval_tokens=512)
    assert result.manifest.scheme.formats == by_hand
    assert result.manifest.scheme.lm_head == "i8"
    stored = [
        weight_dtypes(result.path, f"layers.{layer}.{site}")
        for layer, site in (
            *((0, "attention.qkv"), (0, "attention.o")),
            *((1, "attention.o"), (1, "mlp.gate_up")),
        )
    ]
    assert stored == [{"i4"}, {"i8"}, {"bf16"}, {"i6"}]
    accuracy = result.manifest.accuracy
    assert accuracy is not None and accuracy.kl is not None and 0 < accuracy.kl < 0.3


def test_e4m3_weights_in_a_recipe_need_hardware_that_has_them(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "recipe.json", in_turn(2, "int4_g128", "fp8"))
    request = BuildRequest(str(MODEL), tmp_path / "engine", recipe=recipe)
    with pytest.raises(UnsupportedError, match="sm_80 has no E4M3"):
        build(request, target=CudaTarget(80))


def test_a_budget_is_refused_by_numbers(tmp_path: Path) -> None:
    with pytest.raises(AccuracyError, match=r"\d nats a token") as caught:
        built(tmp_path / "engine", "bf16", max_kl=1e-9, eval_tokens=512)
    assert caught.value.exit_code == 3
    assert list(tmp_path.iterdir()) == []
