"""`trtc compile`: a bundle becomes an engine on a GPU host, here one with the fake library."""

import json
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support import fake_tensorrt
from tests.support.models import random_prompt, tiny_checkpoint
from tests.support.plan_engines import VERSION, fake_machine, request
from tests.support.triton_kernels import needs_triton
from trtc.builder.pipeline import build
from trtc.builder.targets.gpu.triton import TRITON_VERSION
from trtc.builder.targets.tensorrt import compile as tensorrt_compile
from trtc.builder.targets.tensorrt.compile import CompileOptions, compile_bundle
from trtc.cli import main
from trtc.protos.errors import (
    EngineCorruptError,
    EngineIncompatibleError,
    EnvironmentFault,
    RequestError,
    UnsupportedError,
)
from trtc.protos.manifest import Manifest, read_manifest
from trtc.quant.hashing import file_facts
from trtc.runtime.engine.canary import compare
from trtc.runtime.engine.probe import Probe, greedy
from trtc.runtime.engine.session import open_session

needs_triton()


def quiet(message: str) -> None:
    pass


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bundle")
    checkpoint = tiny_checkpoint("llama", directory, num_hidden_layers=1)
    result = build(request(checkpoint, directory / "bundle", "fp32", target="tensorrt:sm_89"))
    note = "there is no plan yet: run `trtc compile` on the directory on the GPU host"
    assert note in result.report.notes
    return result.path


@pytest.fixture
def bundle(built: Path, tmp_path: Path) -> Path:
    """A copy to compile."""
    return Path(shutil.copytree(built, tmp_path / "bundle"))


def reseal(bundle: Path, change: Callable[[Manifest], Manifest]) -> None:
    (bundle / "manifest.json").write_bytes(change(read_manifest(bundle)).sealed().to_json())


def edit_recipe(bundle: Path, **fields: Any) -> None:
    """Alter the recipe and hide it well."""
    path = bundle / "recipe.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    facts = {"recipe.json": file_facts(path)}
    reseal(bundle, lambda m: msgspec.structs.replace(m, files=m.files | facts))


def tokens(bundle: Path) -> tuple[int, ...]:
    with closing(open_session(bundle, num_pages=16)) as session:
        return greedy(session.executor, random_prompt(9), 6)


def test_a_compiled_bundle_lists_its_plan(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_machine(monkeypatch) as machine:
        manifest = compile_bundle(bundle, quiet)
        operators = ("kv_write", "paged_attention", "attention_split", "attention_combine")
        assert machine.trt.library.plugins == {f"trtc::{one}" for one in operators}
    assert manifest == read_manifest(bundle)
    assert manifest.target.plan_version == VERSION
    assert (
        manifest.target.toolchain
        == f"triton {TRITON_VERSION}, PTX 8.7, TensorRT {VERSION} (weights apart)"
    )
    assert manifest.ledger.activations == 2 * fake_tensorrt.SCRATCH_BYTES
    assert {"model.plan", "timing.cache"} <= set(manifest.files)
    assert not list(bundle.glob(".*"))


def test_the_timing_cache_is_used_again(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_machine(monkeypatch):
        first = compile_bundle(bundle, quiet)
        assert (bundle / "timing.cache").read_bytes() == b"timed "
        second = compile_bundle(bundle, quiet)
    assert (bundle / "timing.cache").read_bytes() == b"timed timed "
    assert second.target == first.target


def test_weights_are_stored_once_unless_asked_for(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Path(shutil.copytree(bundle, tmp_path / "whole"))
    weights = read_manifest(bundle).ledger.weights
    with fake_machine(monkeypatch) as machine:
        apart = compile_bundle(bundle, quiet)
        inside = compile_bundle(whole, quiet, CompileOptions(strip=False))
        assert apart.files["model.plan"].bytes < weights
        assert inside.files["model.plan"].bytes > weights
        assert inside.target.toolchain.endswith(f"TensorRT {VERSION}")
        machine.trt.library.refitted.clear()
        assert tokens(bundle) == tokens(whole)
        assert machine.trt.library.refitted == [str(bundle / "graph.onnx")]


def test_a_plan_that_cannot_be_refitted_is_found_where_it_is_made(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = read_manifest(bundle).digest
    with fake_machine(monkeypatch):
        for refusal in (
            {"refit_cuda_engine": lambda self: False},
            {"get_missing_weights": lambda self: ["lm_head.weight"]},
        ):
            with monkeypatch.context() as patch:
                for name, replacement in refusal.items():
                    patch.setattr(fake_tensorrt.Refitter, name, replacement)
                with pytest.raises(UnsupportedError, match=r"trtc compile --no-strip") as caught:
                    compile_bundle(bundle, quiet)
        assert "lm_head.weight" in str(caught.value)
    assert read_manifest(bundle).digest == digest
    assert not (bundle / "model.plan").exists()


def test_a_compilation_that_was_cut_short_is_done_again(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plan and cache are new, the manifest is not: nobody opens that, and compiling mends it."""
    with fake_machine(monkeypatch):
        compile_bundle(bundle, quiet)
        (bundle / "model.plan").write_bytes(b"a newer plan")
        (bundle / "timing.cache").write_bytes(b"a newer cache")
        with pytest.raises(EngineCorruptError, match=r"model\.plan|timing\.cache"):
            open_session(bundle, num_pages=16)
        compile_bundle(bundle, quiet)
        assert (bundle / "timing.cache").read_bytes() == b"timed ", "an unlisted cache is not read"
        assert len(tokens(bundle)) == 6


def test_a_build_where_tensorrt_is_goes_on_to_the_plan_and_measures_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tiny_checkpoint("llama", tmp_path, num_hidden_layers=1)
    options = {"target": "tensorrt:sm_89", "eval_tokens": 512}
    wanted = request(checkpoint, tmp_path / "engine", "fp32", **options)
    with fake_machine(monkeypatch) as machine:
        result = build(wanted, probe=Probe())
        assert result.manifest.target.plan_version == VERSION
        assert result.manifest.accuracy is not None
        assert result.manifest.accuracy.measured_on == "tensorrt:sm_89"
        assert result.manifest.canaries
        assert not any("plan" in note for note in result.report.notes)
        assert machine.gpu.closed
        canary = result.manifest.canaries[0]
        with closing(open_session(result.path, num_pages=16)) as session:
            length = len(canary.token_ids)
            assert greedy(session.executor, canary.prompt_ids, length) == canary.token_ids


def test_on_another_gpu_a_build_stops_at_the_bundle_and_measures_its_twin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the twin said stays when the bundle is compiled, and holds for the plan."""
    checkpoint = tiny_checkpoint("llama", tmp_path, num_hidden_layers=1)
    options = {"max_kl": 0.01, "eval_tokens": 512}
    wanted = request(checkpoint, tmp_path / "engine", "fp32", target="tensorrt:sm_89", **options)
    with fake_machine(monkeypatch, sm=90):
        result = build(wanted, probe=Probe(1))
    bundle = result.manifest
    assert not bundle.target.plan_version
    assert "no plan" in bundle.target.toolchain
    assert bundle.accuracy is not None and bundle.accuracy.measured_on.endswith(" twin")
    assert bundle.canaries and bundle.canary_tolerance > 0
    with fake_machine(monkeypatch):
        compiled = compile_bundle(result.path, quiet)
        assert compiled.accuracy == bundle.accuracy and compiled.canaries == bundle.canaries
        assert compiled.canary_tolerance == bundle.canary_tolerance
        with closing(open_session(result.path, num_pages=16)) as session:
            for canary in compiled.canaries:
                found = greedy(session.executor, canary.prompt_ids, len(canary.token_ids))
                assert compare(found, canary, compiled.canary_tolerance)[1]


# What is refused.


def test_what_is_missing_is_named(bundle: Path) -> None:
    digest = read_manifest(bundle).digest
    with pytest.raises(EnvironmentFault, match=r"tensorrt|NVIDIA GPU"):
        compile_bundle(bundle, quiet)
    assert read_manifest(bundle).digest == digest
    assert not (bundle / "model.plan").exists()


def test_the_bundle_is_checked_first(bundle: Path) -> None:
    kernel = next(bundle.glob("kernels/kv_write-*.ptx"))
    kernel.write_bytes(kernel.read_bytes().replace(b"kv_write", b"kv_wrote"))
    with pytest.raises(EngineCorruptError, match="kv_write-"):
        compile_bundle(bundle, quiet)


@pytest.mark.parametrize(
    ("machine", "message"),
    [
        ({"version": "10.16.1"}, r"tensorrt_major: the bundle is for TensorRT 11.*10\.16\.1"),
        ({"sm": 80}, r"recipe\.json: sm: the bundle is for sm_89, this GPU is sm_80"),
    ],
)
def test_another_library_or_gpu_is_named(
    machine: dict[str, Any], message: str, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        fake_machine(monkeypatch, **machine),
        pytest.raises(EngineIncompatibleError, match=message),
    ):
        compile_bundle(bundle, quiet)


def test_a_recipe_of_another_pool_is_named(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = json.loads((bundle / "recipe.json").read_text())["pool"]
    edit_recipe(bundle, pool=pool | {"page_size": 32})
    with (
        fake_machine(monkeypatch),
        pytest.raises(EngineIncompatibleError, match=r"recipe\.json: pool"),
    ):
        compile_bundle(bundle, quiet)


def test_a_graph_without_registered_plugins_names_the_node(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorrt_compile, "_register_plugins", lambda *arguments: None)
    with (
        fake_machine(monkeypatch),
        pytest.raises(UnsupportedError, match=r"layers\.0\.attention\.kv_write: TensorRT refuses"),
    ):
        compile_bundle(bundle, quiet)


def test_the_command_line_compiles_and_an_engine_of_another_kind_is_refused(
    bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with fake_machine(monkeypatch):
        assert main(["compile", str(bundle), "--no-strip", "--alias-pools", "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert document["target"]["toolchain"].endswith(f"TensorRT {VERSION} (pools aliased)")
        reseal(
            bundle,
            lambda m: msgspec.structs.replace(
                m, target=msgspec.structs.replace(m.target, kind="tensorrt_rtx")
            ),
        )
        with pytest.raises(RequestError, match="compiled already"):
            compile_bundle(bundle, quiet)
