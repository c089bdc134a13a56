"""Which engines make one model, and which of them a machine takes."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.manifests import tiny_manifest, write_engine
from trtc.protos.errors import EngineIncompatibleError, EnvironmentFault, RequestError
from trtc.protos.manifest import Limits, TargetFacts
from trtc.runtime.frontends.triton.engines import EngineSet, choose_engine, read_engines

FILES = {"model.plan": "plan", "tokenizer/tokenizer.json": "{}"}


def gpu_engine(directory: Path, *sms: int, kind: Any = "tensorrt", **fields: Any) -> Path:
    archs = tuple(f"sm_{sm}" for sm in sms)
    target = TargetFacts(kind=kind, name=f"{kind}:{archs[0]}", archs=archs, toolchain="none")
    return write_engine(directory, fields.pop("files", FILES), target=target, **fields)


@pytest.fixture
def pair(tmp_path: Path) -> EngineSet:
    return read_engines([gpu_engine(tmp_path / "a", 80), gpu_engine(tmp_path / "b", 120, 121)])


def test_one_engine_needs_no_map(tmp_path: Path) -> None:
    cpu = read_engines([write_engine(tmp_path / "cpu", {})])
    gpu = read_engines([gpu_engine(tmp_path / "gpu", 90)])
    assert not cpu.on_gpu
    assert gpu.on_gpu
    assert cpu.by_capability == gpu.by_capability == {}
    assert [one.directory for one in (*cpu.engines, *gpu.engines)] == ["engine", "engine"]


def test_several_engines_are_mapped_by_compute_capability(pair: EngineSet) -> None:
    assert pair.on_gpu
    assert pair.by_capability == {"8.0": "sm_80", "12.0": "sm_120-sm_121", "12.1": "sm_120-sm_121"}


@pytest.mark.parametrize(
    ("sm", "directory"), [(80, "sm_80"), (120, "sm_120-sm_121"), (121, "sm_120-sm_121")]
)
def test_the_engine_of_the_gpu_at_hand_is_taken(pair: EngineSet, sm: int, directory: str) -> None:
    assert choose_engine(Path("1"), "", pair.by_capability, sm) == Path("1", directory)


def test_a_gpu_without_an_engine_is_named(pair: EngineSet) -> None:
    with pytest.raises(EngineIncompatibleError, match=r"cc_model_filenames: .* the GPU is 8\.9"):
        choose_engine(Path("1"), "", pair.by_capability, 89)
    with pytest.raises(EnvironmentFault, match="NVIDIA GPU"):
        choose_engine(Path("1"), "", pair.by_capability, None)


def test_a_single_engine_is_where_the_parameter_says() -> None:
    assert choose_engine(Path("1"), "engine", {}, None) == Path("1/engine")


@pytest.mark.parametrize("name", ["", ".", "..", "../engine", "/engine", "a/b"])
def test_an_engine_outside_of_the_version_is_refused(name: str) -> None:
    with pytest.raises(EngineIncompatibleError, match=r"config\.pbtxt: names the engine"):
        choose_engine(Path("1"), name, {}, None)
    with pytest.raises(EngineIncompatibleError, match=r"config\.pbtxt"):
        choose_engine(Path("1"), "", {"9.0": name}, 90)


def test_engines_of_one_model_may_differ_in_their_scheme(tmp_path: Path) -> None:
    scheme = msgspec.structs.replace(tiny_manifest().scheme, name="fp8")
    paths = [gpu_engine(tmp_path / "a", 80), gpu_engine(tmp_path / "b", 90, scheme=scheme)]
    assert len(read_engines(paths).engines) == 2


MODEL = tiny_manifest().model


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "cuda"}, r"differs from .*/a in its target\.kind"),
        ({"model": msgspec.structs.replace(MODEL, hidden_size=1)}, "in its model"),
        (
            {"limits": Limits(max_batch_size=5, max_seq_len=128, max_num_tokens=64)},
            "in its limits",
        ),
        ({"files": {"model.plan": "p", "tokenizer/tokenizer.json": "other"}}, "in its tokenizer"),
    ],
    ids=["kind", "model", "limits", "tokenizer"],
)
def test_engines_of_several_models_are_refused(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    first = gpu_engine(tmp_path / "a", 80)
    with pytest.raises(RequestError, match=rf"/b: .*{message}"):
        read_engines([first, gpu_engine(tmp_path / "b", 90, **fields)])


def test_two_engines_for_one_gpu_are_refused(tmp_path: Path) -> None:
    paths = [gpu_engine(tmp_path / "a", 80, 90), gpu_engine(tmp_path / "b", 90)]
    with pytest.raises(RequestError, match=r"/b: is for sm_90, as .*/a is"):
        read_engines(paths)


def test_several_cpu_engines_are_refused(tmp_path: Path) -> None:
    paths = [write_engine(tmp_path / name, {}) for name in "ab"]
    with pytest.raises(RequestError, match=r"/a: is for CPUs.*--target cpu:ISA,ISA"):
        read_engines(paths)


def test_a_bundle_has_to_be_compiled_first(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"bundle without a plan.*trtc compile"):
        read_engines([gpu_engine(tmp_path / "a", 90, files={"graph.onnx": ""})])


def test_an_engine_has_to_have_weights(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="built without weights"):
        read_engines([write_engine(tmp_path / "a", {}, dummy_weights=True)])
