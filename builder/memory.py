"""Memory planning: offsets in one arena. Buffers with overlapping lifetimes share no bytes."""

from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 64
"""A cache line, and the widest vector register."""


@dataclass(frozen=True)
class Life:
    """A buffer that is written by call `first` and read for the last time by call `last`."""

    bytes: int
    first: int
    last: int

    def overlaps(self, other: "Life") -> bool:
        """Calls read while they write, so a lifetime that ends where another begins overlaps it."""
        return self.first <= other.last and other.first <= self.last


def align(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def place(lives: Sequence[Life]) -> tuple[tuple[int, ...], int]:
    """Return (offset of each buffer, bytes of the arena).

    Greedy by size (Pisarchyk & Lee 2020, arXiv:2001.03288, section 5.2): the largest buffer first,
    each at the lowest gap that is free for its whole lifetime. Ties go to the earlier index, so the
    result depends on nothing but the argument.
    """
    offsets: dict[int, int] = {}
    arena = 0
    for index in sorted(range(len(lives)), key=lambda i: (-lives[i].bytes, i)):
        life = lives[index]
        taken = sorted(
            (offset, offset + align(lives[other].bytes))
            for other, offset in offsets.items()
            if lives[other].overlaps(life)
        )
        start = 0
        for begin, end in taken:
            if begin - start >= life.bytes:
                break
            start = max(start, end)
        offsets[index] = start
        arena = max(arena, start + align(life.bytes))
    return tuple(offsets[i] for i in range(len(lives))), arena
