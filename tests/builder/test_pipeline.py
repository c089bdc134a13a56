"""Whole builds: what is refused and when, what is in the engine, and that it repeats itself."""

import dataclasses
import hashlib
import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import safetensors.torch
from rich.console import Console

from tests.quant.test_calibrate import HELDOUT, calibration_ids, wide_checkpoint
from tests.support.engines import build_tiny, config_dict
from tests.support.models import VOCAB_SIZE, tiny_checkpoint
from tests.support.recipes import in_turn, short_text, write_recipe
from trtc.builder import pipeline
from trtc.builder.engine_size import engine_bytes
from trtc.builder.pipeline import BuildResult, build
from trtc.builder.recipe_budget import FoundRecipe
from trtc.builder.request import BuildRequest
from trtc.builder.source import open_source
from trtc.builder.targets.cpu import CpuTarget
from trtc.builder.targets.cxx import find_compiler
from trtc.builder.targets.registry import parse_target
from trtc.commands.engine_table import engine_table
from trtc.plugins.cpu.host import runnable_isas
from trtc.protos.errors import (
    AccuracyError,
    CalibrationError,
    CheckpointError,
    EnvironmentFault,
    OutputError,
    RequestError,
    TrtcError,
    UnsupportedError,
)
from trtc.protos.manifest import Canary, Manifest, read_manifest
from trtc.protos.plan import read_plan
from trtc.protos.sampling import SamplingDefaults
from trtc.quant.recipe import MIXED_SCHEME, RECIPE_FILE, FormatRecipe, read_recipe
from trtc.quant.site_format import FORMATS, TABLE_FORMATS, TableFormats
from trtc.runtime.engine.canary import compare, why_too_few
from trtc.runtime.engine.probe import Probe
from trtc.runtime.integrity.verify import verify_files

BY_HAND = in_turn(2, "int4_g128", "int8_g128", "bf16", "iq4", "fp8", "int8", "int6_g128")
"""A recipe of MODEL."""
TARGET = CpuTarget(runnable_isas()[:1], optimization="-O0")
"""Models here take longer to compile than to run."""
MODEL = Path(__file__).parents[2] / "examples" / "models" / "pyllama-draft"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tiny_checkpoint("llama", tmp_path_factory.mktemp("model"))
    (path / "generation_config.json").write_text('{"eos_token_id": 2, "repetition_penalty": 1.1}')
    return path


@pytest.fixture(scope="module")
def calib(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return short_text(tmp_path_factory.mktemp("calib"))


def tree(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def request_of(model: object, output: Path, **options: Any) -> BuildRequest:
    small = {"max_batch_size": 2, "max_seq_len": 128, "max_num_tokens": 32}
    return BuildRequest(model=str(model), output=output, **{**small, **options})


# --- What a build makes -----------------------------------------------------------------------


def test_building_twice_gives_the_same_bytes(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX")  # compiled twice, whatever tests/support/caching_cxx knows
    build_tiny(checkpoint, tmp_path / "one" / "engine", "bf16")
    build_tiny(checkpoint, tmp_path / "two" / "engine", "bf16")
    defaults = read_manifest(tmp_path / "one" / "engine").model.sampling_defaults
    assert defaults == SamplingDefaults(repetition_penalty=1.1)
    first = tree(tmp_path / "one" / "engine")
    assert first == tree(tmp_path / "two" / "engine")
    assert not [name for name, content in first.items() if str(tmp_path).encode() in content]


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> tuple[BuildResult, list[str]]:
    """Calibrated on the text that ships with trtc; and what its build said."""
    messages: list[str] = []
    output = tmp_path_factory.mktemp("fp8") / "engine"
    request = request_of(MODEL, output, dtype="fp8", max_kl=0.5, max_seq_len=256, eval_tokens=512)
    result = build(request, probe=Probe(1), progress=messages.append, target=TARGET)
    return result, messages


def test_a_measured_build_of_a_real_model(fp8: tuple[BuildResult, list[str]]) -> None:
    """fp8 through calibration, judged by its own engine; every file matches the manifest."""
    result, messages = fp8
    manifest = read_manifest(result.path)
    assert manifest == result.manifest
    verify_files(result.path, manifest)
    assert sorted(manifest.files) == [
        f"engine-{TARGET.isas[0]}.so",
        "graph.onnx",
        "plan.json",
        "report.html",
        "report.json",
        "sbom.cdx.json",
        "tokenizer/generation_config.json",
        "tokenizer/tokenizer.json",
        "tokenizer/tokenizer_config.json",
        "weights.safetensors",
    ]
    assert manifest.scheme.name == "fp8" and manifest.scheme.calibration_sha256
    accuracy = manifest.accuracy
    assert accuracy is not None and accuracy.kl is not None and accuracy.top1 is not None
    assert 0 < accuracy.kl < 0.1 and 0.8 < accuracy.top1 <= 1
    assert accuracy.reference_perplexity == pytest.approx(accuracy.perplexity, rel=0.05)
    assert len(accuracy.layers) == 7 * manifest.model.num_layers
    assert manifest.canaries
    for canary in manifest.canaries:
        length = len(canary.token_ids)
        assert Probe(1).greedy(result.path, canary.prompt_ids, length) == canary.token_ids
    assert any("compiling" in message for message in messages)
    assert sorted(path.name for path in result.path.parent.iterdir()) == ["engine"]


def test_accuracy_on_a_text_of_the_user(checkpoint: Path, tmp_path: Path) -> None:
    text = tmp_path / "mine.jsonl"
    rows = np.random.default_rng(1).integers(3, VOCAB_SIZE, (60, 10))
    text.write_text("\n".join(json.dumps({"token_ids": row.tolist()}) for row in rows))
    request = request_of(checkpoint, tmp_path / "engine", dtype="bf16", eval_text=text)
    result = build(dataclasses.replace(request, eval_tokens=550), probe=Probe(1), target=TARGET)
    accuracy = result.manifest.accuracy
    assert accuracy is not None and accuracy.kl is not None
    assert (accuracy.text, accuracy.tokens) == ("mine.jsonl", 545), "five windows predict one less"
    assert accuracy.text_sha256 == hashlib.sha256(text.read_bytes()).hexdigest()
    assert "mine.jsonl" in (tmp_path / "engine" / "report.html").read_text()
    with pytest.raises(CalibrationError, match=r"has 600 tokens.*at least 700"):
        build(dataclasses.replace(request, eval_tokens=700, force=True), probe=Probe(1))


def test_keeping_the_noisiest_linear_lowers_the_divergence(
    fp8: tuple[BuildResult, list[str]], tmp_path: Path
) -> None:
    all_quantised = fp8[0]
    before = all_quantised.manifest
    assert before.accuracy is not None and before.accuracy.kl is not None
    worst = min(before.accuracy.layers, key=lambda error: error.sqnr_db).layer
    kept, keep = tmp_path / "kept", (f"{worst}=bf16",)
    request = request_of(MODEL, kept, dtype="fp8", keep=keep, max_seq_len=256, eval_tokens=512)
    after = build(request, probe=Probe(1), target=TARGET).manifest
    assert worst in after.scheme.kept
    assert after.accuracy is not None and after.accuracy.kl is not None
    assert after.accuracy.kl < 0.98 * before.accuracy.kl
    measured = {error.layer for error in after.accuracy.layers}
    assert measured == {e.layer for e in before.accuracy.layers} - set(after.scheme.kept)
    _, _, number, *_, linear = worst.split(".")
    site = linear.removesuffix("_proj")
    stored = {
        weight_dtypes(engine, f"layers.{number}.", site) for engine in (all_quantised.path, kept)
    }
    assert stored == {("i8",), ("bf16",)}, stored
    assert "Kept in bf16" in (kept / "report.html").read_text()


@pytest.mark.parametrize(
    ("family", "scheme", "experts"), [("qwen3_moe", "int4_awq", 6), ("mixtral", "fp8", 4)]
)
def test_keeping_one_expert_keeps_those_of_its_layer(
    family: str, scheme: str, experts: int, tmp_path: Path
) -> None:
    """Measured on a text, or on what the model writes."""
    checkpoint = wide_checkpoint(family, tmp_path)
    text = calibration_ids(tmp_path / "ids.jsonl")
    result = build(
        request_of(
            checkpoint,
            tmp_path / "engine",
            dtype=scheme,
            calib=text,
            eval_text=text if family == "qwen3_moe" else None,
            keep=("*layers.1.*experts.2.*=bf16",),
            eval_tokens=512,
        ),
        probe=Probe(1),
        target=TARGET,
    )
    kept = result.manifest.scheme.kept
    assert len(kept) == 3 * experts, kept
    assert all(".layers.1." in name and ".experts." in name for name in kept)
    stored = [weight_dtypes(result.path, f"layers.{layer}.", "moe") for layer in (0, 1)]
    assert stored == [("i4" if scheme == "int4_awq" else "i8",), ("bf16",)]
    accuracy = result.manifest.accuracy
    assert accuracy is not None and accuracy.kl is not None and accuracy.kl < 1
    assert result.manifest.canaries


@pytest.fixture(scope="module")
def mixed(calib: Path, tmp_path_factory: pytest.TempPathFactory) -> BuildResult:
    """Of a recipe written by hand."""
    directory = tmp_path_factory.mktemp("mixed")
    return build(
        request_of(
            MODEL,
            directory / "engine",
            recipe=write_recipe(directory / "by-hand.json", BY_HAND),
            calib=calib,
            max_seq_len=256,
            eval_tokens=512,
            max_kl=0.5,
        ),
        probe=Probe(1),
        target=TARGET,
    )


def test_every_site_has_the_format_of_the_recipe(mixed: BuildResult) -> None:
    manifest = mixed.manifest
    assert (manifest.scheme.name, manifest.scheme.formats) == ("mixed", BY_HAND)
    assert manifest.scheme.calibration_sha256 is not None
    stored = {
        site: weight_dtypes(mixed.path, "layers.0.", site)
        for site in ("attention.qkv", "attention.o", "mlp.gate_up", "mlp.down")
    }
    assert list(stored.values()) == [("i4",), ("i8",), ("bf16",), ("iq4",)], stored
    assert weight_dtypes(mixed.path, "layers.1.", "mlp.gate_up") == ("i6",)
    assert manifest.accuracy is not None
    measured = {error.layer for error in manifest.accuracy.layers}
    assert "model.layers.0.self_attn.o_proj" in measured
    assert "model.layers.0.mlp.gate_proj" not in measured
    verify_files(mixed.path, manifest)


def test_the_size_of_an_engine_is_known_before_its_weights(mixed: BuildResult) -> None:
    request = request_of(MODEL, mixed.path, max_seq_len=256)
    recipe = read_recipe(mixed.path / RECIPE_FILE)
    bytes_of = engine_bytes(request, open_source(request), TARGET)
    assert bytes_of(recipe) == mixed.manifest.ledger.weights
    narrow = dataclasses.replace(recipe, tables=TableFormats(None, TABLE_FORMATS["iq4"]))
    assert bytes_of(narrow) < bytes_of(recipe)


def test_an_engine_holds_the_recipe_that_repeats_it(mixed: BuildResult) -> None:
    recipe = read_recipe(mixed.path / RECIPE_FILE)
    assert recipe.names == BY_HAND
    page = (mixed.path / "report.html").read_text()
    assert "What each site is stored in" in page and "self_attn.qkv_proj\nint4_g128" in page
    lines = io.StringIO()
    Console(file=lines, width=200).print(engine_table(mixed.path, mixed.manifest))
    assert "int4_g128 2, int6_g128 1, int8 1, int8_g128 1, iq4 1 sites" in lines.getvalue()


def test_a_build_finds_a_recipe_that_keeps_to_a_divergence(calib: Path, tmp_path: Path) -> None:
    steps: list[str] = []
    request = request_of(
        MODEL, tmp_path / "engine", max_kl=0.1, calib=calib, max_seq_len=256, eval_tokens=512
    )
    result = build(
        request, probe=Probe(1), target=TARGET, progress=lambda step: steps.append(str(step))
    )
    accuracy, formats = result.manifest.accuracy, result.manifest.scheme.formats
    assert accuracy is not None and accuracy.kl is not None and accuracy.kl <= 0.1
    assert set(formats) == {*BY_HAND, "embed_tokens"} and "int4" in "".join(formats.values())
    assert result.manifest.scheme.lm_head == result.manifest.scheme.embedding
    assert any("scoring" in step for step in steps)
    frontier = result.report.frontier
    (chosen,) = [point for point in frontier if point.chosen]
    assert 0 < chosen.kl <= 0.1 and 4.125 <= chosen.bits < frontier[-1].bits == 16
    assert [point.bits for point in frontier] == sorted({point.bits for point in frontier})
    page = (result.path / "report.html").read_text()
    assert f"{chosen.bits:.2f} bits, {chosen.kl:.4f}" in page
    verify_files(result.path, result.manifest)


@pytest.mark.parametrize("name", ["tensorrt:sm_90", "tensorrt-rtx:sm_120"])
def test_targets_without_recipes_refuse_them_by_name(name: str) -> None:
    with pytest.raises(UnsupportedError, match=r"--recipe: the target takes one format"):
        parse_target(name).check_scheme(MIXED_SCHEME)


def test_recipes_are_built_until_one_keeps_to_the_divergence(
    calib: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = FormatRecipe({site: FORMATS[name] for site, name in BY_HAND.items()})
    found = (FoundRecipe(recipe, ()), FoundRecipe(FormatRecipe({}), ()))
    monkeypatch.setattr(pipeline, "find_recipes", lambda *args, **options: found)
    request = request_of(
        MODEL, tmp_path / "engine", max_kl=0.01, calib=calib, max_seq_len=256, eval_tokens=512
    )
    result = build(request, probe=Probe(1), target=TARGET)
    assert result.manifest.scheme.name == "bf16" and not result.manifest.scheme.formats
    assert not (result.path / RECIPE_FILE).exists()
    verify_files(result.path, result.manifest)


def weight_dtypes(engine: Path, layer: str, site: str) -> tuple[str, ...]:
    """How the linears of a site are stored, by the plan."""
    calls = [
        call
        for call in read_plan(engine / "plan.json").calls
        if "weight_dtype" in call.attributes and call.site.startswith(layer) and site in call.site
    ]
    return tuple(sorted({str(call.attributes["weight_dtype"]) for call in calls}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "bf16", "keep": ("*=bf16",)}, "--keep: --dtype bf16 quantises nothing"),
        ({"dtype": "fp8", "keep": ("*.down_proj=fp8",)}, "--keep.*kept in bf16 only"),
        ({"dtype": "fp8", "keep": ("*.down=bf16",)}, r"--keep: no quantised linear.*down_proj"),
        ({"dtype": "fp8", "dummy_weights": True, "keep": ("*=bf16",)}, "--keep"),
        ({"dtype": "int4", "recipe": Path("x")}, "--dtype: .*--recipe"),
        ({"keep": ("*=bf16",), "recipe": Path("x")}, "--keep: .*--recipe"),
        ({"dummy_weights": True, "recipe": Path("x")}, "--dummy-weights"),
        ({"recipe": Path("x")}, "--recipe: x: "),
        ({"max_bits": 4.5, "recipe": Path("x")}, "--max-bits: .*--recipe"),
        ({"max_bits": 4.5, "dtype": "int4"}, "--dtype: .*--max-bits"),
        ({"max_bits": 4.0}, "--max-bits: is 4.0"),
        ({"max_bytes": 0}, "--max-bytes: is 0"),
        ({"max_bytes": 10**9, "dtype": "int4"}, "--dtype: .*--max-bytes"),
        ({"max_bytes": 10**9, "recipe": Path("x")}, "--max-bytes: .*--recipe"),
    ],
)
def test_what_cannot_be_kept_is_refused(
    options: dict[str, Any], message: str, checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises(RequestError, match=message):
        build(request_of(checkpoint, tmp_path / "engine", **options), target=TARGET)
    assert list(tmp_path.iterdir()) == []


def test_an_engine_too_far_from_the_original_is_not_left(tmp_path: Path) -> None:
    # As another test has it compiled.
    request = request_of(
        MODEL, tmp_path / "engine", dtype="bf16", max_kl=1e-9, max_seq_len=256, eval_tokens=512
    )
    with pytest.raises(AccuracyError, match=r"nats a token.*--max-kl|--max-kl.*nats a token"):
        build(request, probe=Probe(1), target=TARGET)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_without_a_tokenizer_builds(checkpoint: Path, tmp_path: Path) -> None:
    result = build_tiny(checkpoint, tmp_path / "engine")
    assert not result.manifest.has_tokenizer
    assert not (tmp_path / "engine" / "tokenizer").exists()
    assert any("token ids only" in note for note in result.report.notes)


_WITHOUT_PYTORCH = """
import sys
from pathlib import Path
from trtc.builder.dry_run import dry_run
from trtc.builder.pipeline import build
from trtc.builder.request import BuildRequest
request = BuildRequest(sys.argv[1], Path(sys.argv[2]), dtype="fp32", max_seq_len=64)
assert dry_run(request).weights == build(request).manifest.ledger.weights
assert "torch" not in sys.modules
"""


def test_a_build_that_neither_calibrates_nor_measures_does_not_wait_for_pytorch(
    checkpoint: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", _WITHOUT_PYTORCH, str(checkpoint), str(tmp_path / "engine")]
    subprocess.run(command, check=True)


def test_a_cut_context_is_said_before_the_work(checkpoint: Path, tmp_path: Path) -> None:
    model = shutil.copytree(checkpoint, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 131072}))
    events: list[str] = []
    request = BuildRequest(model=str(model), output=tmp_path / "engine", dtype="fp32")
    with pytest.raises(KeyboardInterrupt):
        build(request, progress=_until("writing", events), notice=events.append)
    (note,) = [event for event in events if "4,096 of the model's 131,072 tokens" in event]
    assert "--max-seq-len 131072" in note and not (tmp_path / "engine").exists()
    asked = dataclasses.replace(request, max_seq_len=2048)
    with pytest.raises(KeyboardInterrupt):
        build(asked, progress=_until("writing", events := []), notice=events.append)
    assert not any("of the model's" in event for event in events)


def _until(phase: str, events: list[str]) -> Callable[[str], None]:
    """A progress callback that interrupts the build where `phase` begins."""

    def progress(message: str) -> None:
        events.append(message)
        if message.startswith(phase):
            raise KeyboardInterrupt

    return progress


def test_several_levels_in_one_engine(checkpoint: Path, tmp_path: Path) -> None:
    isas = tuple(isa for isa in ("x86-64-v4", "generic") if isa in runnable_isas())
    result = build_tiny(checkpoint, tmp_path / "engine", isas=isas)
    assert result.manifest.target.archs == isas
    assert result.manifest.target.name == f"cpu:{','.join(isas)}"
    for isa in isas:
        assert f"engine-{isa}.so" in result.manifest.files


def test_dummy_weights_need_a_config_only(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(
        json.dumps(config_dict("llama", hidden_size=128, intermediate_size=256))
    )
    for dtype in ("bf16", "int4_awq"):
        output = tmp_path / dtype
        request = request_of(model, output, dtype=dtype, dummy_weights=True)
        result = build(request, probe=Probe(1), target=TARGET)
        assert result.manifest.dummy_weights and result.manifest.accuracy is None
        assert result.manifest.ledger.weights > 100_000
        assert not (output / "weights.safetensors").exists()
        logits = next(Probe(1).logits(output, [np.arange(40, dtype=np.int32)]))
        assert np.isfinite(logits).all() and 0.05 < logits.std() < 50
        # Reproducible, and not the same for every token.
        np.testing.assert_array_equal(
            logits, next(Probe(1).logits(output, [np.arange(40, dtype=np.int32)]))
        )
        assert len(set(logits.argmax(axis=1).tolist())) > 3


def test_a_quantised_checkpoint_builds_without_being_asked(calib: Path, tmp_path: Path) -> None:
    from trtc.quant.calibrate import quantize_checkpoint
    from trtc.quant.scheme import SCHEMES

    quantized = tmp_path / "quantized"
    quantize_checkpoint(
        MODEL, SCHEMES["fp8"], "f8e4m3", calib, quantized, lambda message: None, HELDOUT
    )
    request = request_of(
        quantized,
        tmp_path / "engine",
        reference=str(MODEL),
        max_kl=0.5,
        max_seq_len=256,
        eval_tokens=512,
    )
    manifest = build(request, probe=Probe(1), target=TARGET).manifest
    assert manifest.scheme.name == "fp8" and manifest.scheme.source == "modelopt"
    assert {one.entry.element for one in manifest.kv.places} == {"f8e4m3"}
    assert manifest.accuracy is not None and manifest.accuracy.kl is not None

    for options, message in (
        ({"dtype": "int4_awq"}, "quantised as fp8"),
        ({"max_kl": 0.1}, "--reference"),
        ({"max_bits": 4.5}, "--max-bits: the checkpoint is quantised already"),
        ({"max_bytes": 10**9}, "--max-bytes: the checkpoint is quantised already"),
        ({"calib": MODEL / "config.json"}, "quantised already"),
        ({"keep": ("*.o_proj=bf16",)}, "--keep: the checkpoint is quantised already"),
    ):
        with pytest.raises(RequestError, match=message):
            build(request_of(quantized, tmp_path / "no", **options), probe=Probe(1), target=TARGET)


# --- What this machine does not run -------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Elsewhere(CpuTarget):
    """Code that this machine is said not to run."""

    @property
    def runs_here(self) -> bool:
        return False


@pytest.fixture(scope="module")
def measured_by_twin(tmp_path_factory: pytest.TempPathFactory) -> BuildResult:
    output = tmp_path_factory.mktemp("twin") / "engine"
    request = request_of(MODEL, output, dtype="bf16", max_kl=0.5)
    return build(
        dataclasses.replace(request, max_seq_len=256, eval_tokens=512),
        probe=Probe(1),
        target=Elsewhere(("generic",), optimization="-O0"),
    )


def canaries_of(engine: Path, manifest: Manifest) -> str:
    """What serving's check says of an engine; "" when it passes."""
    num_same = 0
    prompts = [canary.prompt_ids for canary in manifest.canaries]
    for canary, found in zip(
        manifest.canaries, Probe(1).canaries(engine, prompts, 16), strict=True
    ):
        same, is_right = compare(found.token_ids, canary, manifest.canary_tolerance)
        if not is_right:
            return f"wrong at {same}"
        num_same += same
    return why_too_few(num_same, manifest.canaries)


def test_an_engine_for_other_machines_is_measured_by_its_twin(
    measured_by_twin: BuildResult,
) -> None:
    manifest = measured_by_twin.manifest
    accuracy = manifest.accuracy
    assert accuracy is not None and accuracy.kl is not None and 0 < accuracy.kl < 0.05
    assert accuracy.measured_on == f"cpu:{TARGET.isas[0]} twin"
    assert manifest.target.archs == ("generic",), "the twin is not what was built"
    assert not list(measured_by_twin.path.glob("*twin*"))
    assert not any("not measured" in note for note in measured_by_twin.report.notes)
    assert manifest.canary_tolerance > 0 and len(manifest.canaries) >= 6
    for canary in manifest.canaries:
        assert len(canary.margins) == len(canary.token_ids)
        assert canary.margins[0] >= manifest.canary_tolerance
    assert canaries_of(measured_by_twin.path, manifest) == "", "other code of the same graph"


def test_a_twin_too_far_from_the_original_fails_the_build(tmp_path: Path) -> None:
    # Of the fixture's shape, whose code is compiled already.
    request = request_of(
        MODEL, tmp_path / "engine", dtype="bf16", max_kl=1e-9, max_seq_len=256, eval_tokens=512
    )
    with pytest.raises(AccuracyError, match="nats a token"):
        build(request, probe=Probe(1), target=Elsewhere(("generic",), optimization="-O0"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["scale", "shuffle"])
def test_canaries_of_a_twin_find_a_wrong_engine(
    damage: str, measured_by_twin: BuildResult, tmp_path: Path
) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(measured_by_twin.path, bad)
    part = "down.weight.scale" if damage == "scale" else "down.weight.compact"
    plan = read_plan(bad / "plan.json")
    weight = next(one for one in plan.weights if part in one.name)
    file = bad / "weights.safetensors"
    begin = 8 + int.from_bytes(file.read_bytes()[:8], "little") + weight.offset
    with file.open("r+b") as stored:
        stored.seek(begin)
        content = np.frombuffer(stored.read(weight.bytes), np.uint8).copy()
        if damage == "scale":
            content = (2 * content.view(np.float32)).view(np.uint8)
        else:
            content = np.random.default_rng(0).permutation(content)
        stored.seek(begin)
        stored.write(content.tobytes())
    assert canaries_of(bad, measured_by_twin.manifest)


def test_without_a_compiler_nothing_is_measured_and_max_kl_says_why(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    elsewhere = Elsewhere(("generic",))
    object.__setattr__(elsewhere, "check", lambda scheme: None)
    request = request_of(checkpoint, tmp_path / "engine", max_kl=1.0)
    with pytest.raises(EnvironmentFault, match=r"--max-kl: cannot be measured.*does not run"):
        build(request, probe=Probe(1), target=elsewhere)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"target": "tensorrt:sm_90"}, "--target: tensorrt:sm_90 has no kernels for the latent"),
        ({"target": "tensorrt-rtx:sm_120"}, "--target: tensorrt-rtx:sm_120 has no kernels for"),
        ({"kv_dtype": "int8"}, "--kv-dtype: the latent attention of DeepseekV3.* kernels for int8"),
        ({"kv_dtype": "int4"}, "--kv-dtype: the latent attention of DeepseekV3.* kernels for int4"),
    ],
)
@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32"])
def test_latent_attention_is_refused_where_no_kernel_has_it(
    family: str, options: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    model = tiny_checkpoint(family, tmp_path)
    with pytest.raises(UnsupportedError, match=problem):
        build(BuildRequest(str(model), tmp_path / "engine", **options))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"target": "tensorrt:sm_90"}, "--target: tensorrt:sm_90 has no kernels for layers that"),
        ({"target": "tensorrt-rtx:sm_120"}, "--target: tensorrt-rtx:sm_120 has no kernels for"),
    ],
)
def test_inputs_of_each_layer_are_refused_where_no_kernel_has_them(
    options: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    model = tiny_checkpoint("gemma4_e", tmp_path)
    with pytest.raises(UnsupportedError, match=problem):
        build(BuildRequest(str(model), tmp_path / "engine", **options))


@pytest.mark.parametrize("target", ["tensorrt:sm_90", "tensorrt-rtx:sm_120"])
def test_targets_without_kernels_for_states_refuse_models_that_keep_them(
    target: str, tmp_path: Path
) -> None:
    model = tiny_checkpoint("lfm2", tmp_path)
    request = BuildRequest(model=str(model), output=tmp_path / "engine", target=target)
    with pytest.raises(UnsupportedError) as caught:
        build(request)
    assert caught.value.field == "--target"
    assert f"{target} has no kernels for the short convolutions of Lfm2" in str(caught.value)
    assert "--target cpu" in caught.value.remedy
    assert not (tmp_path / "engine").exists()


@pytest.mark.parametrize("target", ["tensorrt:sm_90", "tensorrt-rtx:sm_120"])
def test_targets_without_attention_sinks_refuse_them(target: str, tmp_path: Path) -> None:
    model = tiny_checkpoint("gpt_oss", tmp_path)
    request = BuildRequest(model=str(model), output=tmp_path / "engine", target=target)
    with pytest.raises(UnsupportedError, match="no kernels for the attention sinks of GptOss"):
        build(request)


# --- What is refused at the door --------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dtype": "fp7"}, UnsupportedError, "--dtype"),
        ({"dtype": "fp8_weights"}, UnsupportedError, "does not make them"),
        ({"kv_dtype": "int3"}, RequestError, "--kv-dtype"),
        (
            {"kv_dtype": "int4", "target": "tensorrt:sm_90"},
            UnsupportedError,
            "--kv-dtype: tensorrt:sm_90 has no kernels for int4",
        ),
        (
            {"kv_dtype": "int8", "target": "tensorrt:sm_90"},
            UnsupportedError,
            "--kv-dtype: tensorrt:sm_90 has no kernels for int8",
        ),
        ({"target": "cpu:mmx"}, UnsupportedError, "--target"),
        ({"max_batch_size": 0}, RequestError, "--max-batch-size"),
        ({"max_num_tokens": 0}, RequestError, "--max-num-tokens"),
        ({"max_batch_size": 64}, RequestError, "--max-num-tokens"),
        ({"max_seq_len": 0}, RequestError, "--max-seq-len"),
        ({"max_seq_len": 1_000_000}, RequestError, "--max-seq-len"),
        ({"page_size": 3}, RequestError, "--page-size"),
        ({"tp": 3}, RequestError, "--tp: is 3"),
        ({"ep": True}, RequestError, "--ep: experts are spread over the GPUs of --tp"),
        ({"tp": 2, "target": "cpu"}, RequestError, "--tp: is 2, and cpu:.* takes at most 1"),
        ({"max_kl": float("nan")}, RequestError, "--max-kl"),
        ({"max_kl": -1.0}, RequestError, "--max-kl"),
        ({"dtype": "bf16", "calib": Path("x")}, RequestError, "--calib"),
        ({"eval_tokens": 100}, RequestError, "--eval-tokens: is 100.*at least 512"),
        ({"eval_tokens": 0, "max_kl": 1.0}, RequestError, "--max-kl"),
        ({"eval_tokens": 0, "eval_text": Path("x")}, RequestError, "--eval-text"),
        ({"eval_text": Path("nowhere")}, CalibrationError, "--eval-text nowhere: cannot be read"),
        ({"dummy_weights": True, "eval_tokens": 512}, RequestError, "--eval-tokens"),
        ({"dummy_weights": True, "max_kl": 1.0}, RequestError, "--max-kl"),
        ({"dummy_weights": True, "calib": Path("x")}, RequestError, "--calib"),
    ],
)
def test_bad_requests_leave_nothing(
    checkpoint: Path, tmp_path: Path, options: dict[str, Any], error: type[TrtcError], message: str
) -> None:
    with pytest.raises(error, match=message):
        build(request_of(checkpoint, tmp_path / "engine", **options), probe=Probe(1))
    assert list(tmp_path.iterdir()) == []


def test_missing_models_and_existing_outputs(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        build(request_of(tmp_path / "nowhere", tmp_path / "engine"), target=TARGET)
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "mine").write_text("x")
    for force in (False, True):
        with pytest.raises(OutputError):
            build(request_of(checkpoint, tmp_path / "engine", force=force), target=TARGET)
    assert tree(tmp_path) == {"engine/mine": b"x"}


def test_truncated_weights_leave_nothing(checkpoint: Path, tmp_path: Path) -> None:
    broken = tmp_path / "model"
    broken.mkdir()
    (broken / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    weights = (checkpoint / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(weights[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        build(request_of(broken, tmp_path / "engine"), target=TARGET)
    assert not (tmp_path / "engine").exists()


def test_an_engine_that_overflows_is_refused(tmp_path: Path) -> None:
    """A probe that returns NaN stands for a model whose activations overflow."""

    class Overflow:
        def check_tokenizer(self, directory: Path) -> tuple[str, ...]:
            return ()

        def check_grammars(self, directory: Path, vocab_size: int, grammars: Any) -> None:
            raise AssertionError("the request has none")

        def logits(self, engine: Path, sequences: Sequence[Any]) -> Iterator[Any]:
            for sequence in sequences:
                yield np.full((len(sequence), 4096), np.nan, np.float32)

        def canaries(
            self, engine: Path, prompts: Sequence[Sequence[int]], max_tokens: int
        ) -> Iterator[Canary]:
            raise AssertionError("an engine without accuracy has no canaries")

    with pytest.raises(AccuracyError, match="overflows"):
        build(
            request_of(MODEL, tmp_path / "engine", eval_tokens=512), probe=Overflow(), target=TARGET
        )
    assert list(tmp_path.iterdir()) == []


def test_a_killed_build_leaves_no_engine(tmp_path: Path) -> None:
    """kill -9 while it works, at several moments; the next build cleans up after it."""
    command = [sys.executable, "-m", "trtc", "build", "--model", str(MODEL), "--dtype", "fp32"]
    command += ["--output", str(tmp_path / "engine")]
    for words in ("planning", "compiling"):
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as child:
            assert child.stderr is not None
            for line in child.stderr:
                if words in line:
                    break
            time.sleep(0.2)
            os.kill(child.pid, signal.SIGKILL)
        assert not (tmp_path / "engine").exists()
    build(request_of(MODEL, tmp_path / "engine", dtype="fp32"), target=TARGET)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["engine"]


def runs(pid: int) -> bool:
    """Whether a process lives; a dead one that nobody has waited for does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


_SLOW_COMPILER = """#!/bin/sh
case "$*" in
  *engine-*) sleep 300 & echo $! > "{pid}"; wait ;;
  *) exec {real} "$@" ;;
esac
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_build_told_to_end_leaves_nothing_and_no_compiler(
    checkpoint: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """The compiler has a child of its own, as g++ has cc1plus."""
    pid_file, compiler, place = tmp_path / "pid", tmp_path / "g++", tmp_path / "place"
    compiler.write_text(_SLOW_COMPILER.format(pid=pid_file, real=find_compiler().command[0]))
    compiler.chmod(0o755)
    command = [sys.executable, "-m", "trtc", "build", "--model", str(checkpoint)]
    command += ["--output", str(place / "engine"), "--dummy-weights", "--max-seq-len", "64"]
    environment = os.environ | {"CXX": str(compiler)}
    with subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        # A shell that runs the tests in the background has them ignore SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as child:
        assert child.stderr is not None
        while not (pid_file.exists() and pid_file.read_text()):
            assert child.poll() is None, child.stderr.read()
            time.sleep(0.05)
        if number is signal.SIGTERM:
            with pytest.raises(OutputError, match="/engine: another trtc is writing it"):
                build(request_of(checkpoint, place / "engine", dummy_weights=True), target=TARGET)
        child.send_signal(number)
        said = child.stderr.read().splitlines()[-1]
    assert child.returncode == 128 + number
    assert said in ("trtc: terminated", "trtc: interrupted")
    assert not place.exists()
    assert not runs(int(pid_file.read_text()))


def test_a_limit_of_file_sizes_ends_a_build_in_one_line(checkpoint: Path, tmp_path: Path) -> None:
    """`ulimit -f`, which ends other programs by SIGXFSZ."""
    command = [sys.executable, "-m", "trtc", "build", "--model", str(checkpoint)]
    command += ["--output", str(tmp_path / "engine"), "--dtype", "bf16"]
    limit = 100_000
    status = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert status.returncode == OutputError.exit_code
    assert "ulimit -f" in status.stderr.splitlines()[-1], status.stderr
    assert list(tmp_path.iterdir()) == []


def test_unknown_tensors_are_mentioned(checkpoint: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    tensors = safetensors.torch.load_file(checkpoint / "model.safetensors")
    tensors["extra.weight"] = tensors["model.norm.weight"].clone()
    safetensors.torch.save_file(tensors, model / "model.safetensors")
    result = build_tiny(model, tmp_path / "engine")
    assert any("extra.weight" in note for note in result.report.notes)
