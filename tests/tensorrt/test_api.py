"""Our code uses nothing that TensorRT 11.4 lacks, and its plugins live through the binding."""

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import fake_tensorrt
from tests.support.bundles import write_kernel_bundle
from tests.support.tensorrt_stubs import make_stubs, run_over_stubs
from tests.support.triton_kernels import needs_triton

ROOT = Path(__file__).parent.parent.parent
TABLE = ROOT / "tests/tensorrt/api_11_4.json"
OBJECTS = {
    "builder/targets/tensorrt/plan.py": {
        "builder": "Builder",
        "network": "INetworkDefinition",
        "parser": "OnnxParser",
        "config": "IBuilderConfig",
        "profile": "IOptimizationProfile",
        "error": "ParserError",
        "tensor": "ITensor",
        "flags": "NetworkDefinitionCreationFlag",
    },
    "builder/targets/tensorrt/compile.py": {"engine": "ICudaEngine"},
    "builder/targets/tensorrt/rtx.py": {},
    "plugins/tensorrt/library.py": {},
    "plugins/tensorrt/aot.py": {},
    "plugins/tensorrt/refit.py": {
        "refitter": "Refitter",
        "parser": "OnnxParserRefitter",
        "error": "ParserError",
    },
    "plugins/attention_combine/tensorrt.py": {},
    "plugins/attention_split/tensorrt.py": {},
    "plugins/kv_write/tensorrt.py": {},
    "plugins/paged_attention/tensorrt.py": {},
    "runtime/executors/tensorrt_opening.py": {"_runtime": "Runtime", "engine": "ICudaEngine"},
    "runtime/executors/tensorrt_plan.py": {
        "engine": "ICudaEngine",
        "_engine": "ICudaEngine",
        "context": "IExecutionContext",
    },
}
"""Every file that uses TensorRT, and what it calls the objects that it gets from it."""
RTX_ONLY = {
    ("IBuilderConfig", "num_compute_capabilities"),
    ("IBuilderConfig", "set_compute_capability"),
    ("", "ComputeCapability"),
    ("", "EngineValidity"),
    ("IExecutionContext", "is_stream_capturable"),
    ("Runtime", "get_engine_validity"),
}
"""What TensorRT for RTX has and TensorRT lacks; our code asks for it only of the former."""
Api = dict[str, dict[str, str]]
Use = tuple[str, str]
"""(class, or "" for the module, or "plugin" for tensorrt.plugin; member)."""


def members() -> Api:
    table: Api = json.loads(TABLE.read_text())["members"]
    return table


def chains(path: Path) -> Iterator[tuple[str, ...]]:
    """Every `a.b.c` of a file, longest only; `self.a.b` counts as `a.b`."""
    inner: set[int] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            parts: list[str] = []
            value: Any = node
            while isinstance(value, ast.Attribute):
                inner.add(id(value))
                parts.append(value.attr)
                value = value.value
            if isinstance(value, ast.Name):
                names = [value.id, *reversed(parts)]
                yield tuple(names[1:] if names[0] == "self" else names)


def uses(path: Path, objects: dict[str, str]) -> Iterator[Use]:
    """What a file uses of TensorRT."""
    for name, *parts in chains(path):
        if not parts:
            continue
        if name in ("trt", "_trt"):
            yield ("", parts[0])
            if len(parts) > 1:
                yield (parts[0], parts[1])
        elif name == "trtp":
            yield ("plugin", parts[0])
        elif name in objects:
            yield (objects[name], parts[0])


def unknown_uses(path: Path, objects: dict[str, str], table: Api) -> list[Use]:
    known = {(owner, member) for owner, members in table.items() for member in members}
    return [
        (owner, member)
        for owner, member in uses(path, objects)
        if (owner, member) not in known | RTX_ONLY | {("", "__name__")}
        and (owner in table or owner == "")
    ]


def all_uses() -> set[Use]:
    return {use for name, objects in OBJECTS.items() for use in uses(ROOT / name, objects)}


def test_every_use_of_tensorrt_exists() -> None:
    table = members()
    assert len(all_uses()) > 70, "the files use TensorRT under other names"
    wrong = {
        name: unknown
        for name, objects in OBJECTS.items()
        if (unknown := unknown_uses(ROOT / name, objects, table))
    }
    assert wrong == {}


def test_no_other_file_uses_tensorrt() -> None:
    """A file that is not in the table above would go unchecked."""
    found = {
        path.relative_to(ROOT).as_posix()
        for folder in ("builder", "plugins", "runtime", "trtc/commands")
        for path in (ROOT / folder).rglob("*.py")
        if any(chain[0] in ("trt", "trtp", "_trt") for chain in chains(path))
    }
    assert found <= set(OBJECTS)


def test_a_wrong_use_is_found(tmp_path: Path) -> None:
    path = tmp_path / "tensorrt_plan.py"
    path.write_text(
        "trt.Builder(log).max_batch_size\ntrt.BuilderFlag.FP16\nconfig.int8_calibrator = 1\n"
        "trtp.launch\ntrt.BuilderFlag.REFIT\nself._engine.device_memory_size\n"
    )
    objects = {"config": "IBuilderConfig", "_engine": "ICudaEngine"}
    assert unknown_uses(path, objects, members()) == [
        ("BuilderFlag", "FP16"),
        ("IBuilderConfig", "int8_calibrator"),
        ("plugin", "launch"),
        ("ICudaEngine", "device_memory_size"),
    ]


def test_tensorrt_for_rtx_has_what_is_used_of_it() -> None:
    """The same code drives both libraries."""
    rtx: Any = pytest.importorskip(
        "tensorrt_rtx", reason="make test-tensorrt installs it", exc_type=ImportError
    )
    lacking = {
        (owner, member)
        for owner, member in all_uses() | RTX_ONLY
        if owner != "plugin" and not hasattr(getattr(rtx, owner) if owner else rtx, member)
    }
    assert lacking == set()


def test_the_fake_offers_nothing_that_the_libraries_lack() -> None:
    """What the tests of executor and compiler rely on is the real library's to give."""
    table = members()
    offered: set[Use] = set()
    for name, cls in vars(fake_tensorrt).items():
        if isinstance(cls, type) and cls.__module__ == fake_tensorrt.__name__:
            real = name.removeprefix("Rtx")
            offered |= {(real, member) for member in vars(cls) if not member.startswith("_")}
            offered.add(("", real))
    own = {
        ("", "Library"),
        *(("Library", one) for one in vars(fake_tensorrt.Library)),
        *(("INetworkDefinition", one) for one in ("path", "model")),
    }
    rtx = {
        (one, each.name)
        for one in ("ComputeCapability", "EngineValidity")
        for each in getattr(fake_tensorrt, one)
    }
    known = {(owner, member) for owner, members in table.items() for member in members}
    assert offered - own - rtx <= known | RTX_ONLY
    assert len(offered & known) > 80


def test_the_table_is_that_of_the_binding(tmp_path: Path) -> None:
    result = run_over_stubs(make_stubs(tmp_path), "-m", "tests.tensorrt.api_table")
    assert result.returncode == 0, result.stderr
    live = json.loads("\n".join(x for x in result.stdout.splitlines() if not x.startswith("[")))
    assert live["version"] == "11.4.0.106"
    assert live == json.loads(TABLE.read_text())


@pytest.fixture(scope="module")
def kernel_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    needs_triton()
    return write_kernel_bundle(tmp_path_factory.mktemp("kernels") / "bundle")


@pytest.mark.parametrize("alias", [False, True])
def test_the_plugins_live_through_the_ahead_of_time_cycle(
    alias: bool, kernel_bundle: Path, tmp_path: Path
) -> None:
    """Types, shapes, formats, tactics, launch and code, by TensorRT's own Python layer."""
    stubs, bundle = make_stubs(tmp_path), kernel_bundle
    result = run_over_stubs(stubs, "-m", "tests.tensorrt.qdp_life", str(bundle), *["alias"] * alias)
    assert result.returncode == 0, result.stderr
    lives = json.loads(result.stdout[result.stdout.index("[{") :])
    write, decode, prefill, split, _, combine, combine_many = lives
    assert write["aliased"] == (2 if alias else -1)
    assert write["grid"] == ["T", "1", "1"]
    assert write["formats"][2] == write["formats"][6] == "DataType.FP8"
    assert (decode["tactics"], decode["scalars"]) == ([1, 2], ["B", "P"])
    assert decode["grid"] == ["((T ceil/ 8) + B)", "2", "1"]
    assert prefill["grid"] == ["((T ceil/ 32) + B)", "2", "1"]
    assert decode["output_shapes"] == [["(T + 0)", "(256 + 0)"]]
    assert split["outputs"] == ["DataType.BF16", "DataType.FLOAT", "DataType.FLOAT"]
    assert split["output_sizes"] == [[37, 256], [5, 8 * 4 * 64], [5, 8 * 4 * 2]]
    assert split["scalars"] == ["B", "P"] and split["formats"][7:] == split["outputs"]
    programs = "((8 min ((P * 16) ceil/ 256)) * 2)"
    assert split["grid"] == [decode["grid"][0], programs, "1"], "no more than a page table holds"
    assert combine["outputs"] == ["DataType.BF16"] and combine["scalars"] == ["B"]
    assert combine["grid"] == ["T", "4", "1"] and combine_many["grid"] == ["T", "1", "1"]
    for one in lives:
        assert one["code_bytes"] > 1000
        assert one["entry"] == one["op"]
