"""Write calibration.txt from the project's own sources and prose.

    python -m trtc.quant.data.make

Files that heldout.txt may quote, chosen by a hash of their path, are left out, so that no file is
in both. The texts are committed: they change an engine's bytes, and so only when somebody means
them to.
"""

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

DATA = Path(__file__).parent
ROOT = DATA.resolve().parents[1]
FOLDERS = ("builder", "docs", "examples", "plugins", "protos", "quant", "runtime", "tests", "trtc")
SUFFIXES = (".py", ".hpp", ".md")
CALIBRATION_BYTES = 180_000
_FILE_BYTES = 6_000
"""Of one file, so that no part of the project speaks for all of it."""
_HELDOUT_SHARE = 5


def main() -> None:
    paths = sorted(_sources(), key=lambda path: _hash(path))
    calibration = [path for path in paths if int(_hash(path)[:8], 16) % _HELDOUT_SHARE != 0]
    (DATA / "calibration.txt").write_text(_joined(calibration, CALIBRATION_BYTES))


def _sources() -> Iterator[Path]:
    """Written by hand and read by people: no generated code, no links, no hidden files."""
    folders = (ROOT / name for name in FOLDERS)
    for path in itertools.chain(ROOT.glob("*.md"), *(folder.rglob("*") for folder in folders)):
        relative = path.relative_to(ROOT)
        is_link = any((ROOT / part).is_symlink() for part in (relative, *relative.parents))
        if path.suffix in SUFFIXES and path.is_file() and not is_link and "_pb2" not in path.name:
            yield path


def _hash(path: Path) -> str:
    return hashlib.sha256(path.relative_to(ROOT).as_posix().encode()).hexdigest()


def _joined(paths: Sequence[Path], size: int) -> str:
    """Prose first and whole, then files in turn, cut at paragraphs, up to `size` bytes."""
    prose = [path for path in paths if path.suffix == ".md"]
    code = [path for path in paths if path.suffix != ".md"]
    parts: list[str] = []
    for path in (*prose, *code):
        text = _excerpt(path.read_text(encoding="utf-8"))
        if text and sum(map(len, parts)) + len(text) <= size:
            parts.append(text)
    return "\n\n".join(parts) + "\n"


def _excerpt(text: str) -> str:
    if len(text) > _FILE_BYTES:
        text = text[: text.rfind("\n\n", 0, _FILE_BYTES)]
    return text.strip("\n")


if __name__ == "__main__":
    main()
