"""Writes the table of docs/families.md from the code: `python -m tests.support.families_page`."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from trtc.builder.family_support import SCHEMES_BUILT, TARGETS_SHOWN, FamilyRow, family_rows

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
_BEGIN, _END = "<!-- generated -->\n", "<!-- end -->\n"


def page(rows: Iterable[FamilyRow]) -> str:
    """The page, its table written anew."""
    head, _, rest = PAGE.read_text().partition(_BEGIN)
    _, _, tail = rest.partition(_END)
    return "".join((head, _BEGIN, *(f"{line}\n" for line in _table(rows)), _END, tail))


def _table(rows: Iterable[FamilyRow]) -> Iterator[str]:
    yield f"| architecture | {' | '.join(TARGETS_SHOWN)} | beside what Llama has |"
    yield "|---|" + "---|" * (len(TARGETS_SHOWN) + 1)
    for row in rows:
        targets = " | ".join(_schemes(row, kind) for kind in TARGETS_SHOWN)
        yield f"| `{row.architecture}` | {targets} | {', '.join(row.features)} |"


def _schemes(row: FamilyRow, kind: str) -> str:
    built = row.targets.get(kind, ())
    if not built:
        return "no"
    missing = [name for name in SCHEMES_BUILT if name not in built]
    if len(missing) > len(built):
        return ", ".join(built)
    return f"all but {', '.join(missing)}" if missing else "all"


if __name__ == "__main__":
    PAGE.write_text(page(family_rows()))
