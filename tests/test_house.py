"""Habits of the house that no linter knows."""

import re
import subprocess
from pathlib import Path

import pytest

from trtc.plugins.registry import REGISTRY
from trtc.quant.scheme import BUILDABLE, SCHEMES

ROOT = Path(__file__).parent.parent
OPERATOR_FOLDERS = sorted(path.parent.name for path in (ROOT / "plugins").glob("*/op.py"))


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


def test_every_pass_has_a_test_file() -> None:
    own = {"__init__", "base", "order"}
    passes = {path.stem for path in (ROOT / "builder" / "passes").glob("*.py")} - own
    tested = "\n".join(
        path.read_text() for path in (ROOT / "tests/builder/passes").glob("test_*.py")
    )
    assert passes, "no passes found"
    untested = {
        name for name in passes if f"passes.{name}" not in tested and not name.startswith("_")
    }
    assert not untested


def test_buildable_schemes_are_schemes() -> None:
    assert set(BUILDABLE) <= set(SCHEMES)


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
