"""Habits of the house that no linter knows."""

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import grimp
import pytest

from trtc.plugins.registry import REGISTRY
from trtc.protos.generate import FOREIGN
from trtc.quant.scheme import BUILDABLE, SCHEMES

ROOT = Path(__file__).parent.parent
OPERATOR_FOLDERS = sorted(path.parent.name for path in (ROOT / "plugins").glob("*/op.py"))
_RECORDS = {"NamedTuple", "Struct"}
"""Bases of classes with fields that are no dataclasses."""


def tracked_files() -> list[Path]:
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False, text=True
    )
    if listing.returncode != 0:
        pytest.skip("not a git checkout")
    paths = [ROOT / name for name in listing.stdout.split("\0") if name]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def test_registry_is_exactly_the_operator_folders() -> None:
    assert sorted(REGISTRY) == OPERATOR_FOLDERS


@pytest.mark.parametrize("name", OPERATOR_FOLDERS)
def test_operator_folder_has_definition_and_reference(name: str) -> None:
    operator = REGISTRY[name]
    assert operator.name == name
    assert (ROOT / "plugins" / name / "reference.py").exists()
    outputs = {dtype for parameter in operator.outputs[:1] for dtype in parameter.dtypes}
    if outputs - {"i32"} and not operator.in_place:
        assert set(operator.tolerances) >= outputs & {"f32", "bf16"}


def test_kernels_are_of_operators_that_a_plan_can_call() -> None:
    """Plans have no kv_write (verify_native), as rope_kv_write does it. TensorRT's plugins have
    kernels of their own."""
    plugins = {
        name for name in OPERATOR_FOLDERS if (ROOT / "plugins" / name / "tensorrt.py").exists()
    }
    in_plans = (set(OPERATOR_FOLDERS) - plugins) | {"paged_attention"}
    for kernel in ("cpu.hpp", "cuda.py"):
        found = {name for name in OPERATOR_FOLDERS if (ROOT / "plugins" / name / kernel).exists()}
        assert found <= in_plans, kernel
    for name in plugins:
        assert (ROOT / "plugins" / name / "tensorrt_kernel.py").exists()


def test_every_pass_has_a_test_file() -> None:
    """test_<pass>.py, which imports the pass and has a test."""
    own = {"__init__", "base", "order"}
    passes = {path.stem for path in (ROOT / "builder" / "passes").glob("*.py")} - own
    assert passes, "no passes found"
    untested = {name for name in passes if not name.startswith("_") and not _is_tested(name)}
    assert not untested


def _is_tested(name: str) -> bool:
    page = ROOT / "tests/builder/passes" / f"test_{name}.py"
    if not page.exists():
        return False
    nodes = list(ast.walk(ast.parse(page.read_text())))
    imported = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    tests = [
        node
        for node in nodes
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    return f"trtc.builder.passes.{name}" in imported and bool(tests)


def test_there_is_no_import_cycle() -> None:
    """Imports within functions count: a late one only hides a cycle."""
    graph = grimp.build_graph("trtc")
    waiting = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    while done := [name for name, needs in waiting.items() if not needs & waiting.keys()]:
        for name in done:
            del waiting[name]
    assert not sorted(waiting), "these import each other, or what does"


def test_buildable_schemes_are_schemes() -> None:
    assert set(BUILDABLE) <= set(SCHEMES)


SAMPLING_PARAMETERS_OF_ONE_MEANING = (
    *("min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
)
"""Names that nothing else has: `top_k` is also of experts, `temperature` of what callers ask."""


@pytest.mark.parametrize("name", SAMPLING_PARAMETERS_OF_ONE_MEANING)
def test_a_sampling_parameter_is_spelled_in_six_files_at_most(name: str) -> None:
    """docs/extending.md lists them."""
    spelled = re.compile(rf"\b{name}\b")
    packages = ("builder", "plugins", "protos", "quant", "runtime", "trtc")
    files = [
        str(path.relative_to(ROOT))
        for path in tracked_files()
        if path.relative_to(ROOT).parts[0] in packages
        and path.suffix in (".py", ".hpp", ".cu", ".cuh", ".proto")
        and not path.stem.endswith("_pb2")
        and path.parent.name not in FOREIGN  # protocols of others have these names too
        and spelled.search(path.read_text())
    ]
    declared = {"protos/sampling.py", "protos/trtc/v1/inference.proto"}
    assert declared < set(files)
    assert len(files) <= 6, files


def test_no_unfinished_work() -> None:
    marks = re.compile(r"\b(TODO|FIXME|XXX|NotImplementedError)\b")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in tracked_files()
        if path.suffix in (".py", ".hpp", ".cpp", ".proto") and path != Path(__file__)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if marks.search(line)
    ]
    assert not found


def test_markdown_links_lead_somewhere() -> None:
    broken = []
    for page in (path for path in tracked_files() if path.suffix == ".md"):
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
            if (
                not target.startswith(("http:", "https:", "mailto:"))
                and not (page.parent / target).exists()
            ):
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert not broken


EXTENDING = (ROOT / "docs" / "extending.md").read_text()


def test_extending_names_files_that_are_there() -> None:
    named = set(re.findall(r"`([a-z]+/[\w./]*)`", EXTENDING))
    missing = {name for name in named if "NAME" not in name and not (ROOT / name).exists()}
    assert len(named) > 50 and not missing


@pytest.mark.parametrize("chapter", EXTENDING.split("\n## ")[1:])
def test_each_chapter_of_extending_says_what_proves_it(chapter: str) -> None:
    _, table, proofs = chapter.partition("| proves | by |\n|---|---|\n")
    rows = [line for line in proofs.splitlines() if line.startswith("|")]
    assert table and all(re.search(r"`(tests/|test_|make )", row) for row in rows), chapter[:40]


@pytest.mark.parametrize(
    ("folder", "shared"),
    [
        ("frontends", {"asgi", "base"}),
        (
            "frontends/http",
            {
                *("application", "connections", "cors", "exchange", "listener", "plain", "port"),
                "routes",
                "server",
                # of several dialects
                *("bodies", "events", "failures", "generation", "logprobs", "messages", "running"),
                *("sampling", "structured"),
            },
        ),
    ],
)
def test_every_frontend_and_dialect_stands_apart_from_the_others(
    folder: str, shared: set[str]
) -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    path = ROOT / "runtime" / folder
    package = f"trtc.runtime.{folder.replace('/', '.')}"
    found = {one.stem for one in path.iterdir() if not one.name.startswith("__")} - shared
    apart = {f"{package}.{name}" for name in found}
    independent = [
        set(one["modules"]) for one in contracts["contracts"] if one["type"] == "independence"
    ]
    assert apart in independent


def test_no_code_compares_an_sm_with_a_number() -> None:
    """plugins/gpu/arch.py has what is known of an SM."""
    compared = re.compile(r"__CUDA_ARCH__|\bsm\s*(?:[<>]=?|[=!]=|\bin\b)\s*[({[]?\d{2,3}\b")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in tracked_files()
        if path.suffix in (".py", ".cu", ".cuh")
        and path.relative_to(ROOT).parts[0] not in ("tests", "examples")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if compared.search(line) and path.name != "arch.py"
    ]
    assert not found


def test_fields_of_named_tuples_and_structs_have_no_dataclass_defaults() -> None:
    """`dataclasses.field` there would be the default itself, and mypy takes it."""
    wrong = []
    for path in tracked_files():
        text = path.read_text() if path.suffix == ".py" else ""
        if not any(name in text for name in _RECORDS):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef) and _bases(node) & _RECORDS:
                wrong += [
                    f"{path.name}: {node.name}" for one in node.body if _is_dataclass_field(one)
                ]
    assert not wrong


def _bases(node: ast.ClassDef) -> set[str]:
    return {ast.unparse(base).rpartition(".")[2] for base in node.bases}


def _is_dataclass_field(node: ast.stmt) -> bool:
    """msgspec's own is called as `msgspec.field`."""
    return (
        isinstance(node, ast.AnnAssign)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func) in ("field", "dataclasses.field")
    )
