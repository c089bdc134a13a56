"""`trtc build --target tensorrt-rtx:sm_89`: whole engines by the real builder, without a GPU."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest

from tests.support.compiled import compile_once
from tests.support.models import tiny_checkpoint
from tests.support.plan_engines import request
from tests.support.triton_kernels import needs_triton
from trtc.builder.pipeline import build
from trtc.builder.targets.tensorrt import kernels as tensorrt_kernels
from trtc.builder.targets.tensorrt.cut import cut
from trtc.builder.targets.tensorrt.rtx import parse_tensorrt_rtx_target
from trtc.cli import main
from trtc.protos.errors import EnvironmentFault, UnsupportedError
from trtc.protos.manifest import read_manifest
from trtc.protos.stages import Launch, Segment, read_stages
from trtc.protos.step import graph_inputs
from trtc.quant.scheme import SCHEMES
from trtc.runtime.integrity.verify import verify_files

needs_triton()
trt: Any = pytest.importorskip(
    "tensorrt_rtx", reason="make test-tensorrt installs it", exc_type=ImportError
)

LAYERS = 3


@pytest.fixture(scope="module", autouse=True)
def kernels_once() -> Iterator[None]:
    """Two of these engines have the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensorrt_kernels, "compile_kernels", compile_once)
        yield


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two SMs, and two kinds of attention layers."""
    directory = tmp_path_factory.mktemp("rtx")
    checkpoint = tiny_checkpoint("gemma2", directory, num_hidden_layers=LAYERS)
    target = "tensorrt-rtx:sm_120,sm_80"
    return build(request(checkpoint, directory / "engine", "bf16", target=target)).path


def test_the_engine_is_complete(engine: Path) -> None:
    manifest = read_manifest(engine)
    target = manifest.target
    assert (target.kind, target.plan_version) == ("tensorrt_rtx", trt.__version__)
    assert target.name == "tensorrt-rtx:sm_80,sm_120"
    assert target.archs == ("sm_80", "sm_120")
    verify_files(engine, manifest)
    stages = read_stages(engine)
    assert stages.pool == manifest.kv
    cubins = {kernel.cubin for kernels in stages.kernels.values() for kernel in kernels}
    assert len(cubins) == 2 * (1 + 2 * 2), "a write, and two tactics of two attentions, an SM"
    assert {*stages.plans, *cubins, "stages.json"} <= set(manifest.files)
    assert not {"weights.safetensors", "graph.onnx"} & set(manifest.files), "weights are in plans"
    weights = sum(manifest.files[plan].bytes for plan in stages.plans)
    assert weights > manifest.ledger.weights


def test_segments_and_kernels_alternate(engine: Path) -> None:
    stages = read_stages(engine)
    layer = ["kv_write", "paged_attention"]
    ops = [stage.op if isinstance(stage, Launch) else "plan" for stage in stages.stages]
    assert ops == [*["plan", *layer] * LAYERS, "plan"]
    assert len(set(stages.plans)) == LAYERS + 1


def test_every_tensor_is_made_before_it_is_read(engine: Path) -> None:
    stages = read_stages(engine)
    known = {name for name, _, _ in graph_inputs(len(stages.pool.groups))}
    known |= {*stages.constants, *(f"kv_{layer}" for layer in range(LAYERS))}
    for stage in stages.stages:
        if isinstance(stage, Segment):
            reads, makes = set(stage.inputs), set(stage.outputs)
        else:
            makes = {
                stage.arguments[name] for name in ("out", "pool_out") if name in stage.arguments
            }
            reads = set(stage.arguments.values()) - makes
        assert reads <= known
        known |= makes
    assert "logits" in known


def test_each_profile_has_its_tactic(engine: Path) -> None:
    stages = read_stages(engine)
    assert [profile.name for profile in stages.profiles] == ["decode", "prefill"]
    windows = []
    for stage in (stage for stage in stages.stages if isinstance(stage, Launch)):
        for kernels in stages.kernels.values():
            chosen = [kernels[index] for index in stage.kernels]
            assert {kernel.op for kernel in chosen} == {stage.op}
            tactics = [kernel.tactic for kernel in chosen]
            assert tactics == ([1, 2] if stage.op == "paged_attention" else [1, 1])
        if stage.op == "paged_attention":
            windows.append(chosen[0].attributes["window"])
    assert windows == [20, 0, 20]


def test_inspect_shows_it(
    engine: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["inspect", str(engine), "--verify"]) == 0
    out = capsys.readouterr().out
    assert "tensorrt-rtx:sm_80,sm_120" in out
    assert f"TensorRT for RTX {trt.__version__}" in out
    assert "files match the manifest" in out
    assert main(["inspect", str(engine), "--plan"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("4 plans, 6 launches")
    assert sum("paged_attention" in line for line in lines) >= LAYERS
    assert main(["inspect", str(engine), "--plan", "--json"]) == 0
    groups = json.loads(capsys.readouterr().out)["pool"]["groups"]
    assert [group["kind"]["type"] for group in groups] == ["full", "window", "window"]
    assert [entry["layer"] for group in groups for entry in group["entries"]] == [1, 0, 2]


def test_the_command_line_builds_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = tiny_checkpoint("llama", tmp_path, num_hidden_layers=1)
    output = tmp_path / "engine"
    arguments = ["--target", "tensorrt-rtx:sm_89,sm_120", "--kv-dtype", "fp8", "--eval-tokens", "0"]
    command = ["build", "--model", str(checkpoint), "--output", str(output), *arguments]
    assert main([*command, "--max-seq-len", "64", "--max-batch-size", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["target"]["archs"] == ["sm_89", "sm_120"]
    assert main(["serve", str(output), "--grpc-port", "0"]) == 5
    error = capsys.readouterr().err
    assert "NVIDIA GPU" in error


def test_without_the_library_there_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    checkpoint = tiny_checkpoint("llama", tmp_path)
    output = tmp_path / "engine"
    command = ["build", "--model", str(checkpoint), "--output", str(output)]
    assert main([*command, "--target", "tensorrt-rtx:sm_89"]) == 5
    lines = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert len(lines) == 1
    assert "tensorrt_rtx: TensorRT for RTX is needed to build plans" in lines[0]
    assert "pip install 'trtc[tensorrt-rtx]'" in lines[0]
    assert not output.exists()


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("mixtral", {"max_num_tokens": 1 << 24}, "largest tensor. Use at most 2796202"),
        ("llama", {"target": "tensorrt-rtx:sm_89,sm_80", "dtype": "fp8"}, "sm_80 has no E4M3"),
        ("llama", {"target": "tensorrt-rtx:sm_86", "kv_dtype": "fp8"}, "sm_86 has no E4M3"),
        ("llama", {"target": "tensorrt-rtx:sm_120,sm_89", "dtype": "nvfp4"}, "sm_89 has no FP4"),
        ("llama", {"target": "tensorrt-rtx:sm_90"}, "'sm_90' is not an SM that TensorRT for RTX"),
        ("llama", {"target": "tensorrt-rtx"}, "says no SM.*sm_80, sm_86, sm_89, sm_120"),
        ("llama", {"dummy_weights": True}, "a plan is built from its weights"),
    ],
)
def test_what_cannot_be_is_refused(
    family: str, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    checkpoint = tiny_checkpoint(family, tmp_path)
    fields = {"target": "tensorrt-rtx:sm_89", "dtype": "bf16", **options}
    with pytest.raises(UnsupportedError, match=message):
        build(request(checkpoint, tmp_path / "engine", **fields))
    assert not (tmp_path / "engine").exists()


def test_triton_is_asked_for_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtc.builder.targets.gpu.triton.TRITON_VERSION", "0.0")
    with pytest.raises(EnvironmentFault, match=r"triton 0\.0"):
        parse_tensorrt_rtx_target("sm_89").check(SCHEMES["bf16"])


def test_long_contexts_are_split_between_plans(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"num_hidden_layers": 1, "max_position_embeddings": 2048}
    checkpoint = tiny_checkpoint("llama", tmp_path, **sizes)
    options = {"target": "tensorrt-rtx:sm_89", "max_seq_len": 1024, "kv_dtype": "fp8"}
    engine = build(request(checkpoint, tmp_path / "engine", "bf16", **options)).path
    stages = read_stages(engine)
    ops = [stage.op if isinstance(stage, Launch) else "plan" for stage in stages.stages]
    assert ops == ["plan", "kv_write", "attention_split", "attention_combine", "plan"]
    assert {buffer.rows for buffer in stages.buffers} == {"T", "B"}


# The cut.


def node(op: str, name: str, inputs: list[str], domain: str = "") -> onnx.NodeProto:
    return onnx.helper.make_node(op, inputs, [f"{name}.out"], name=name, domain=domain)


def test_arithmetic_of_weights_and_integers_is_copied_and_nothing_else() -> None:
    """x -> a -> attention -> b, where a and b share a transposed weight and the positions."""
    info = onnx.helper.make_tensor_value_info
    f32, i32, i64 = onnx.TensorProto.FLOAT, onnx.TensorProto.INT32, onnx.TensorProto.INT64
    nodes = [
        node("Transpose", "turned", ["w"]),
        node("Cast", "wide", ["positions"]),
        node("Cast", "floating", ["positions"]),
        node("MatMul", "a", ["x", "turned.out"]),
        node("Gather", "a2", ["a.out", "wide.out"]),
        node("paged_attention", "attend", ["a2.out"], "trtc"),
        node("MatMul", "b", ["attend.out", "turned.out"]),
        node("Gather", "b2", ["b.out", "wide.out"]),
        node("Add", "b3", ["b2.out", "a.out"]),
        node("Add", "logits", ["b3.out", "floating.out"]),
    ]
    matrices = ("turned", "a", "a2", "attend", "b", "b2", "b3", "floating")
    graph = onnx.helper.make_graph(
        nodes,
        "decoder",
        [info("x", f32, ("T", 4)), info("positions", i32, ("T",))],
        [info("logits.out", f32, ("T", 4))],
        initializer=[onnx.helper.make_tensor("w", f32, (4, 4), [0.0] * 16)],
        value_info=[
            info("wide.out", i64, ("T",)),
            *(info(f"{name}.out", f32, ("T", 4)) for name in matrices),
        ],
    )
    first, second = cut(onnx.helper.make_model(graph))
    names = [[one.name for one in subgraph.model.graph.node] for subgraph in (first, second)]
    assert names == [
        ["floating", "turned", "a", "wide", "a2"],
        ["turned", "b", "wide", "b2", "b3", "logits"],
    ]
    assert [one.name for one in first.gap] == ["attend"] and second.gap == ()
    assert first.inputs == ("x", "positions")
    assert first.outputs == ("floating.out", "a.out", "a2.out")
    assert second.inputs == ("positions", "a.out", "attend.out", "floating.out")
    assert second.outputs == ("logits.out",)
