"""What may not be opened is refused before the library sees a plan, by field and with a remedy."""

import importlib
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support import fake_tensorrt
from tests.support.models import tiny_checkpoint
from tests.support.plan_engines import Machine, build_plans, fake_machine, request
from tests.support.triton_kernels import needs_triton
from trtc.builder.pipeline import build
from trtc.cli import main
from trtc.plugins.gpu.probe import device_sm
from trtc.protos.errors import (
    EngineCorruptError,
    EngineIncompatibleError,
    EnvironmentFault,
    RequestError,
    TrtcError,
)
from trtc.protos.manifest import Manifest, read_manifest
from trtc.quant.hashing import file_facts
from trtc.runtime.device.driver_api import DriverApi
from trtc.runtime.engine.session import open_session
from trtc.runtime.executors import tensorrt_opening

needs_triton()

Damage = Callable[[Path], None]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("engines")
    checkpoint = tiny_checkpoint("llama", directory, num_hidden_layers=1)
    bundle = request(checkpoint, directory / "bundle", "fp32", target="tensorrt:sm_89")
    with pytest.MonkeyPatch.context() as patch:
        return {
            "bundle": build(bundle).path,
            "compiled": build_plans(checkpoint, directory / "compiled", "fp32", patch),
            "rtx": build_plans(checkpoint, directory / "rtx", "fp32", patch, "tensorrt-rtx"),
        }


@pytest.fixture(params=["compiled", "rtx"])
def engine(request: pytest.FixtureRequest, engines: dict[str, Path], tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(engines[request.param], tmp_path / request.param))


def refused(
    machine: Machine, engine: Path, error: type[TrtcError], message: str, **options: Any
) -> TrtcError:
    with pytest.raises(error, match=message) as caught:
        open_session(engine, **{"num_pages": 16, **options})
    assert caught.value.field and caught.value.remedy
    assert machine.trt.library.deserialized == machine.rtx.library.deserialized == 0
    return caught.value


def reseal(engine: Path, change: Callable[[Manifest], Manifest]) -> None:
    """Alter the manifest as someone with bad intentions and the source code would."""
    (engine / "manifest.json").write_bytes(change(read_manifest(engine)).sealed().to_json())


def edit(engine: Path, name: str, change: Callable[[Any], Any]) -> None:
    """Alter a JSON file and hide it well."""
    path = engine / name
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    facts = {name: file_facts(path)}
    reseal(engine, lambda m: msgspec.structs.replace(m, files=m.files | facts))


def test_a_bundle_without_a_plan_says_what_to_run(
    engines: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bundle = engines["bundle"]
    with fake_machine(monkeypatch) as machine:
        refused(machine, bundle, EngineIncompatibleError, "no plan yet.*trtc compile")
        assert main(["generate", str(bundle), "--prompt-ids", "3"]) == 4
    assert f"Run `trtc compile {bundle}` on the GPU host" in capsys.readouterr().err


def test_a_missing_library_is_named(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_rtx = engine.name == "rtx"
    module = "tensorrt_rtx" if is_rtx else "tensorrt"
    with fake_machine(monkeypatch) as machine, monkeypatch.context() as patch:
        patch.setitem(sys.modules, module, None)
        error = refused(machine, engine, EnvironmentFault, f"^{module}: .*is needed to run")
    assert ("trtc[tensorrt-rtx]" if is_rtx else "trtc[tensorrt]") in error.remedy


@pytest.mark.parametrize("found", ["10.16.1", "11.3.0.99", "1.6.0.1"])
def test_a_plan_of_another_version_is_named(
    found: str, engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = read_manifest(engine).target.plan_version
    with fake_machine(monkeypatch, version=found, rtx_version=found) as machine:
        error = refused(
            machine,
            engine,
            EngineIncompatibleError,
            rf"target\.plan_version: the plans are of .* {made}, this machine has {found}",
        )
    assert made in error.remedy
    assert ("trtc compile" in error.remedy) == (engine.name == "compiled")


def test_another_gpu_is_named(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_machine(monkeypatch, sm=90) as machine:
        error = refused(
            machine, engine, EngineIncompatibleError, r"target\.archs: .* sm_89, this GPU is sm_90"
        )
    assert "sm_90" in error.remedy


def test_no_gpu_is_named(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_machine(monkeypatch) as machine, monkeypatch.context() as patch:
        patch.setattr(tensorrt_opening, "device_sm", lambda: None)
        refused(machine, engine, EnvironmentFault, "NVIDIA GPU and its driver.*nvidia-smi")


@pytest.mark.parametrize("place", [0, 0.5, -1])
def test_one_flipped_byte_of_a_plan_is_found(
    place: float, engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = next(iter([*engine.glob("model.plan"), *engine.glob("plans/*.plan")]))
    content = bytearray(plan.read_bytes())
    content[int(place * len(content))] ^= 0x04
    plan.write_bytes(content)
    with fake_machine(monkeypatch) as machine:
        error = refused(machine, engine, EngineCorruptError, "differs from the manifest's sha256")
    assert error.field == str(plan)


def _set(planes: list[dict[str, Any]], field: str, value: Any) -> None:
    for plane in planes:
        plane[field] = value


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda kv: kv.update(page_size=16), "page_size: is 16, and manifest.json says 8"),
        (
            lambda kv: _set(kv["groups"][0]["entries"][0]["planes"], "width", 8),
            "groups[0].entries[0].planes[0].width: is 8, and manifest.json says 16",
        ),
        (
            lambda kv: _set(kv["groups"][0]["entries"][0]["planes"], "dtype", "bf16"),
            "groups[0].entries[0].planes[0].dtype: is bf16, and manifest.json says f32",
        ),
        (
            lambda kv: kv["groups"][0]["entries"].append(
                kv["groups"][0]["entries"][0] | {"layer": 7}
            ),
            "groups[0].entries.length: is 2, and manifest.json says 1",
        ),
    ],
)
def test_another_cache_layout_is_named(
    change: Callable[[Any], Any], message: str, engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the plans' description, and in the recipe that a bundle was compiled by."""
    names = ["stages.json"] if engine.name == "rtx" else ["recipe.json", "stages.json"]
    for name in names:
        edit(engine, name, lambda document: change(document["pool"]))
        expected = re.escape(f"{name}: pool.{message}")
        with fake_machine(monkeypatch) as machine:
            refused(machine, engine, EngineIncompatibleError, expected)


def test_a_manifest_of_another_pool_is_named(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reseal(
        engine,
        lambda m: msgspec.structs.replace(m, kv=msgspec.structs.replace(m.kv, page_size=32)),
    )
    with fake_machine(monkeypatch) as machine:
        refused(machine, engine, EngineIncompatibleError, r"pool\.page_size: is 8, .* says 32")


def test_files_that_no_one_has_hashed_are_not_loaded(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = read_manifest(engine).files
    wanted = {"compiled": {"model.plan", "graph.onnx", "weights.safetensors", "stages.json"}}
    wanted["rtx"] = {name for name in files if name.endswith((".plan", ".cubin"))}
    with fake_machine(monkeypatch) as machine:
        for name in wanted[engine.name]:
            left = {other: facts for other, facts in files.items() if other != name}
            manifest = msgspec.structs.replace(read_manifest(engine), files=left)
            (engine / "manifest.json").write_bytes(manifest.sealed().to_json())
            refused(machine, engine, EngineCorruptError, rf"{name}: is not listed")


def test_a_pool_beyond_what_the_plans_take_is_named(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice what four sequences of 128 tokens need: 128 pages of 8."""
    with fake_machine(monkeypatch, engine) as machine:
        refused(machine, engine, RequestError, "holds 129 pages.*128 at most", num_pages=129)
        opened = open_session(engine, num_pages=128)
        assert opened.executor.num_pages == 128
        opened.close()
        opened = open_session(engine)
        assert opened.executor.num_pages == 64
        opened.close()


def test_a_pool_that_does_not_fit_the_gpu_is_named(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_machine(monkeypatch) as machine:
        machine.gpu.total_bytes = 200_000
        refused(machine, engine, EnvironmentFault, "--kv-bytes: a pool of", num_pages=100)


# The library refuses what our files promise.


def test_a_plan_that_the_library_refuses_is_named(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest lies about the version: hashes match, and the library finds it."""
    name = "plan_version"
    target = read_manifest(engine).target
    lie = msgspec.structs.replace(target, **{name: "99.0"})
    reseal(engine, lambda m: msgspec.structs.replace(m, target=lie))
    with (
        fake_machine(monkeypatch, engine, version="99.0", rtx_version="99.0") as machine,
        pytest.raises(EngineIncompatibleError, match="the library refuses the plan") as caught,
    ):
        open_session(engine, num_pages=16)
    assert caught.value.field.endswith(".plan")
    assert machine.gpu.closed
    if engine.name == "rtx":
        assert machine.rtx.library.deserialized == 0, "TensorRT for RTX says so unopened"


def test_a_plan_with_other_tensors_is_named(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(stages: Any) -> None:
        stages["stages"][-1]["inputs"].remove("logit_rows")

    edit(engine, "stages.json", forget)
    with (
        fake_machine(monkeypatch, engine) as machine,
        pytest.raises(EngineIncompatibleError, match=r"stages\.json differ in logit_rows"),
    ):
        open_session(engine, num_pages=16)
    assert machine.gpu.closed


def test_a_plan_of_other_types_or_shapes_is_named(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = read_manifest(engine)
    model = msgspec.structs.replace(manifest.model, vocab_size=manifest.model.vocab_size + 1)
    reseal(engine, lambda m: msgspec.structs.replace(m, model=model))
    with (
        fake_machine(monkeypatch, engine),
        pytest.raises(EngineIncompatibleError, match=r"logits has shape \(-1, 160\)"),
    ):
        open_session(engine, num_pages=16)


def test_what_the_library_will_not_do_is_an_error_with_its_reason(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None and False are how it says no."""

    def say_no(self: Any, *arguments: Any) -> Any:
        log = getattr(self, "_log", None) or self._engine._log
        log.log(fake_tensorrt.ILogger.ERROR, "out of contexts")
        return None

    refusals = [
        (fake_tensorrt.ICudaEngine, "create_execution_context", "give a context"),
        (fake_tensorrt.IExecutionContext, "set_optimization_profile_async", "take profile 0"),
        (fake_tensorrt.IExecutionContext, "set_tensor_address", "take an address"),
    ]
    with fake_machine(monkeypatch, engine) as machine:
        for owner, method, message in refusals:
            with monkeypatch.context() as patch:
                patch.setattr(owner, method, say_no)
                with pytest.raises(EnvironmentFault, match=f"{message}.*out of contexts"):
                    open_session(engine, num_pages=16)
                assert machine.gpu.closed


# The driver, on this machine.


def test_without_cuda_bindings_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(EnvironmentFault, match=r"^cuda-bindings: .*trtc\[tensorrt\]"):
        DriverApi("tensorrt")


def test_without_a_driver_it_is_named() -> None:
    importlib.import_module("cuda.bindings.driver")
    if device_sm() is not None:
        pytest.skip("this machine has a GPU")
    with pytest.raises(EnvironmentFault, match=r"^(libcuda\.so\.1|the CUDA driver): "):
        DriverApi("tensorrt")
