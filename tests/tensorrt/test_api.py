"""Our code uses nothing that TensorRT 11.4 lacks, and its plugins live through the binding."""

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.bundles import write_kernel_bundle
from tests.support.tensorrt_stubs import make_stubs, run_over_stubs
from tests.support.triton_kernels import needs_triton

ROOT = Path(__file__).parent.parent.parent
SOURCES = sorted(
    [
        *(ROOT / "builder/targets").glob("tensorrt_*.py"),
        *(ROOT / "plugins").glob("*/tensorrt.py"),
        ROOT / "plugins/cuda/qdp.py",
    ]
)
TABLE = ROOT / "tests/tensorrt/api_11_4.json"
OBJECTS = {
    "builder": "Builder",
    "network": "INetworkDefinition",
    "parser": "OnnxParser",
    "config": "IBuilderConfig",
    "profile": "IOptimizationProfile",
    "error": "ParserError",
    "tensor": "ITensor",
    "flags": "NetworkDefinitionCreationFlag",
}
"""What builder/targets/tensorrt_plan.py calls the objects that it gets from TensorRT."""


def members() -> dict[str, dict[str, str]]:
    table: dict[str, dict[str, str]] = json.loads(TABLE.read_text())["members"]
    return table


def chains(path: Path) -> Iterator[tuple[str, ...]]:
    """Every `a.b.c` of a file, longest only."""
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
                yield (value.id, *reversed(parts))


def unknown_uses(path: Path, table: dict[str, dict[str, str]]) -> list[str]:
    wrong = []
    for name, *parts in chains(path):
        if name == "trt":
            known = parts[0] in table[""] and (
                len(parts) == 1 or parts[0] not in table or parts[1] in table[parts[0]]
            )
            known = known or parts == ["__name__"]
        elif name == "trtp":
            known = parts[0] in table["plugin"]
        elif name in OBJECTS and path.name == "tensorrt_plan.py":
            known = parts[0] in table[OBJECTS[name]]
        else:
            continue
        if not known:
            wrong.append(f"{path.name}: {name}.{'.'.join(parts)}")
    return wrong


def test_every_use_of_tensorrt_exists() -> None:
    table = members()
    uses = [one for path in SOURCES for one in chains(path) if one[0] in ("trt", "trtp", *OBJECTS)]
    assert len(uses) > 40, "the files use TensorRT under other names"
    assert [wrong for path in SOURCES for wrong in unknown_uses(path, table)] == []


def test_a_wrong_use_is_found(tmp_path: Path) -> None:
    path = tmp_path / "tensorrt_plan.py"
    path.write_text(
        "trt.Builder(log).max_batch_size\ntrt.BuilderFlag.FP16\nconfig.int8_calibrator = 1\n"
        "trtp.launch\ntrt.BuilderFlag.REFIT\n"
    )
    assert len(unknown_uses(path, members())) == 3


def test_the_table_is_that_of_the_binding(tmp_path: Path) -> None:
    result = run_over_stubs(make_stubs(tmp_path), "-m", "tests.tensorrt.api_table")
    assert result.returncode == 0, result.stderr
    live = json.loads("\n".join(x for x in result.stdout.splitlines() if not x.startswith("[")))
    assert live["version"] == "11.4.0.106"
    assert live == json.loads(TABLE.read_text())


@pytest.mark.parametrize("alias", [False, True])
def test_the_plugins_live_through_the_ahead_of_time_cycle(alias: bool, tmp_path: Path) -> None:
    """Types, shapes, formats, tactics, launch and code, by TensorRT's own Python layer."""
    needs_triton()
    stubs = make_stubs(tmp_path)
    bundle = write_kernel_bundle(tmp_path / "bundle", alias_pools=alias)
    result = run_over_stubs(stubs, "-m", "tests.tensorrt.qdp_life", str(bundle))
    assert result.returncode == 0, result.stderr
    write, decode, prefill = json.loads(result.stdout[result.stdout.index("[{") :])
    assert write["aliased"] == (2 if alias else -1)
    assert write["grid"] == ["T", "1", "1"]
    assert write["formats"][2] == write["formats"][6] == "DataType.FP8"
    assert (decode["tactics"], decode["scalars"]) == ([1, 2], ["B", "P"])
    assert decode["grid"] == ["((T ceil/ 8) + B)", "2", "1"]
    assert prefill["grid"] == ["((T ceil/ 32) + B)", "2", "1"]
    assert decode["output_shape"] == ["(T + 0)", "(256 + 0)"]
    for one in (write, decode, prefill):
        assert one["code_bytes"] > 1000
        assert one["entry"] == one["op"]
