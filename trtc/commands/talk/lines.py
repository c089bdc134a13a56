"""What the user says, message by message: typed with history and editing, or piped in."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from trtc.commands.screen import Screen
from trtc.protos.errors import RequestError

PROMPT = ">>> "
CONTINUED = "... "
QUOTES = '"""'
"""Begins and ends a message of several lines."""
MAX_PIPED_BYTES = 16 << 20
_HISTORY_LINES = 1000

Ask = Callable[[str], str]
"""A line, after a prompt. Raises EOFError at the end."""


def history_file() -> Path:
    """Where typed lines are kept, as the XDG base directories say."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "trtc" / "chat_history"


def typed_messages(screen: Screen) -> Iterator[str]:
    """Messages from a terminal, until Ctrl-D; Ctrl-C gives up what is being typed."""
    while True:
        try:
            yield _message(_typed_line)
        except EOFError:
            screen.say()
            return
        except KeyboardInterrupt:
            screen.say()
            screen.hint("Ctrl-D or /bye ends.")
        except UnicodeDecodeError:
            screen.complain(RequestError("what was typed is not UTF-8"))


def piped_messages() -> Iterator[str]:
    """Messages from a file or a program, a line each.

    Raises:
        RequestError: they are too long, or not UTF-8.
    """
    lines = iter(piped_text().splitlines())

    def next_line(prompt: str) -> str:
        line = next(lines, None)
        if line is None:
            raise EOFError
        return line

    while True:
        try:
            yield _message(next_line)
        except EOFError:
            return


def piped_text() -> str:
    """All of standard input, where it is no terminal.

    Raises:
        RequestError: it is too long, or not UTF-8.
    """
    content = sys.stdin.buffer.read(MAX_PIPED_BYTES + 1)
    if len(content) > MAX_PIPED_BYTES:
        raise RequestError(f"has more than {MAX_PIPED_BYTES} bytes", field="standard input")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        problem = f"is not UTF-8 ({error.reason} at byte {error.start})"
        raise RequestError(problem, field="standard input") from error


@contextmanager
def line_editing(*, history: bool) -> Iterator[None]:
    """Lines are edited, and remembered from one conversation to the next if `history`."""
    try:
        import readline
    except ImportError:  # a Python without it
        yield
        return
    # A pasted text of several lines is one message.
    readline.parse_and_bind("set enable-bracketed-paste on")
    path = history_file()
    if history:
        _read_history(readline.read_history_file, path)
    try:
        yield
    finally:
        if history:
            readline.set_history_length(_HISTORY_LINES)
            _write_history(readline.write_history_file, path)


def _read_history(read: Callable[[str], None], path: Path) -> None:
    """History is a comfort: without it the conversation goes on."""
    try:
        if path.is_file():
            read(str(path))
    except (OSError, ValueError):
        return


def _write_history(write: Callable[[str], None], path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(mode=0o600)
        write(str(path))
    except OSError:
        return


def _message(ask: Ask) -> str:
    """A line, or the lines between quotes."""
    line = ask(PROMPT)
    if not line.lstrip().startswith(QUOTES):
        return line
    lines = [line.lstrip().removeprefix(QUOTES)]
    while not lines[-1].rstrip().endswith(QUOTES):
        lines.append(ask(CONTINUED))
    return "\n".join(lines).rstrip().removesuffix(QUOTES).strip("\n")


def _typed_line(prompt: str) -> str:
    line = input(prompt)
    return line.encode(errors="surrogateescape").decode(errors="replace")
