"""Progress of long work, as a line of text with its numbers."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

_T = TypeVar("_T")


class Step(str):
    """The current work: a line of text, and how much of it is done.

    `done` and `total` count `unit`s; both are None if the work is not counted.
    """

    phase: str
    done: int | None
    total: int | None
    unit: str

    def __new__(
        cls, phase: str, done: int | None = None, total: int | None = None, unit: str = ""
    ) -> "Step":
        is_counted = done is not None and total is not None
        step = super().__new__(cls, f"{phase}: {done}/{total} {unit}" if is_counted else phase)
        step.phase, step.done, step.total, step.unit = phase, done, total, unit
        return step


Progress = Callable[[Step], None]
"""Called with every step, which is a str."""


def counted(
    items: Iterable[_T], phase: str, total: int, unit: str, report: Progress
) -> Iterator[_T]:
    """Yield the items, reporting progress before the first one and after each."""
    report(Step(phase, 0, total, unit))
    for done, item in enumerate(items, 1):
        yield item
        report(Step(phase, min(done, total), total, unit))
