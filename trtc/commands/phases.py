"""Progress of long commands: what is being done now."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


@contextmanager
def phases() -> Iterator[Callable[[str], None]]:
    """A spinner with the current phase; a line each phase where stderr is not a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _PhaseLines(console)
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as live:
        task = live.add_task("starting")

        def show(message: str) -> None:
            live.update(task, description=escape(message))

        yield show


class _PhaseLines:
    """Prints a phase when it begins, and not every tensor within it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._phase = ""

    def __call__(self, message: str) -> None:
        phase = message.partition(" ")[0]
        if phase != self._phase:
            self._console.print(escape(message), highlight=False)
        self._phase = phase
