"""Write calibration.txt from the project's own sources and prose, and from written.txt.

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
_PROSE_BYTES = 20_000
"""Of documentation, which is longer than all the code that there is room for."""
_HELDOUT_SHARE = 5
_BETWEEN = "\n\n\n"
"""Sections of written.txt."""


def main() -> None:
    paths = sorted(_sources(), key=lambda path: _hash(path))
    calibration = [path for path in paths if int(_hash(path)[:8], 16) % _HELDOUT_SHARE != 0]
    written = (DATA / "written.txt").read_text(encoding="utf-8").strip("\n").split(_BETWEEN)
    parts = spread(written, _excerpts(calibration, CALIBRATION_BYTES))
    (DATA / "calibration.txt").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def spread(few: Sequence[str], many: Sequence[str]) -> list[str]:
    """`few` in their order, as evenly as may be between `many`: wherever a calibration takes its
    windows, it finds some of both."""
    ends = [(at + 1) * len(many) // len(few) for at in range(len(few))]
    parts: list[str] = []
    for one, begin, end in zip(few, [0, *ends], ends, strict=False):
        parts += [*many[begin:end], one]
    return parts


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


def _excerpts(paths: Sequence[Path], size: int) -> list[str]:
    """Some prose, then files of code in turn, cut at paragraphs, up to `size` bytes."""
    prose = [path for path in paths if path.suffix == ".md"]
    code = [path for path in paths if path.suffix != ".md"]
    parts: list[str] = []
    for kind, limit in ((prose, _PROSE_BYTES), (code, size)):
        for path in kind:
            text = _excerpt(path.read_text(encoding="utf-8"))
            if text and sum(map(len, parts)) + len(text) <= limit:
                parts.append(text)
    return parts


def _excerpt(text: str) -> str:
    if len(text) > _FILE_BYTES:
        text = text[: text.rfind("\n\n", 0, _FILE_BYTES)]
    return text.strip("\n")


if __name__ == "__main__":
    main()
