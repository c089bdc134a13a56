"""Progress of long commands: what is being done, how much of it is done, how long it will take."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from trtc.protos.progress import Step

_LINE_SECONDS = 15.0
"""Between two lines of one phase, where stderr is not a terminal."""


@contextmanager
def phases() -> Iterator[Callable[[str], None]]:
    """A bar with the current phase; a few lines a phase where stderr is not a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield PhaseLines(lambda line: console.print(escape(line), highlight=False, soft_wrap=True))
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[count]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=console, transient=True) as live:
        yield _Bar(live)


class _Bar:
    def __init__(self, live: Progress) -> None:
        self._live = live
        self._task = live.add_task("starting", total=None, count="")
        self._phase = "starting"

    def __call__(self, message: str) -> None:
        step = as_step(message)
        if step.phase != self._phase:
            self._live.reset(self._task, total=step.total)
            self._phase = step.phase
        self._live.update(
            self._task,
            description=escape(step.phase if isinstance(message, Step) else message),
            total=step.total,
            completed=step.done or 0,
            count="" if step.total is None else f"{step.done}/{step.total} {step.unit}",
        )


class PhaseLines:
    """Prints a phase when it begins, and now and then how much of it is done."""

    def __init__(
        self, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._write = write
        self._clock = clock
        self._phase = ""
        self._began = 0.0
        self._written = 0.0

    def __call__(self, message: str) -> None:
        step, now = as_step(message), self._clock()
        if step.phase != self._phase:
            self._phase, self._began, self._written = step.phase, now, now
            self._write(step.phase if isinstance(message, Step) else message)
        elif step.done and step.total and now - self._written >= _LINE_SECONDS:
            self._written = now
            left = (now - self._began) * (step.total - step.done) / step.done
            self._write(f"{step}, about {left:.0f} s left")


def as_step(message: str) -> Step:
    """Of plain text the first word names the phase."""
    return message if isinstance(message, Step) else Step(message.partition(" ")[0])
