"""Rules for replacing outputs, and directories that replace an output atomically."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from trtc.protos.errors import OutputError
from trtc.protos.staging import (
    Staging,
    absolute,
    exchange_with_output,
    put_in_place,
    settle,
    staging,
    sync,
)


@dataclass(frozen=True)
class OutputKind:
    """The kind of a command's output, which --force replaces."""

    name: str
    """`an engine`."""
    why_foreign: Callable[[Path], str | None]
    """Why a directory is not of this kind, as a clause; None: it is."""
    option: str = "--output"
    """The option that names the output."""


def refuse_occupied(output: Path, kind: OutputKind, *, force: bool) -> None:
    """Refuse an output that must not be replaced; an empty directory may be.

    Raises:
        OutputError: it exists and `force` is off, or it is not of `kind`.
    """
    if not output.exists() and not output.is_symlink():
        return
    if output.is_dir() and not output.is_symlink() and not any(output.iterdir()):
        return
    if not force:
        raise OutputError(
            "exists already",
            field=str(output),
            remedy=f"Choose another {kind.option}, or give --force",
        )
    _refuse_foreign(output, kind, output)


@contextmanager
def new_directory(
    output: Path,
    kind: OutputKind,
    *,
    force: bool,
    beside: Path | None = None,
) -> Iterator[Path]:
    """Context manager: a directory to write into, which becomes `output` unless the body raises.

    Args:
        beside: of what the directory is a hidden sibling until then, on the output's file system;
            None: of the output.

    Raises:
        OutputError: the output is in the way, another trtc is writing it, or the disk refuses.
    """
    output = absolute(output)
    refuse_occupied(output, kind, force=force)
    with staging(output, None if beside is None else absolute(beside)) as place:
        yield place.new
        publish(place, kind, force=force)


def publish(place: Staging, kind: OutputKind, *, force: bool) -> None:
    """Sync a staged directory to the disk and rename it to the output, atomically.

    Raises:
        OutputError: the output was created meanwhile.
    """
    settle(place.new)
    if not put_in_place(place):
        refuse_occupied(place.output, kind, force=force)
        exchange_with_output(place, lambda old: _refuse_foreign(old, kind, place.output))
    sync(place.output.parent)


def _refuse_foreign(directory: Path, kind: OutputKind, output: Path) -> None:
    """Raises OutputError if `directory`, which is or was at `output`, is not of `kind`."""
    problem = kind.why_foreign(directory)
    if problem is not None:
        raise OutputError(
            f"is not {kind.name} ({problem}), and --force replaces nothing else",
            field=str(output),
            remedy=f"Choose another {kind.option}, or remove it yourself",
        )
