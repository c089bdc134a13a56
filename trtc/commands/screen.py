"""What commands show of texts that a model wrote."""

import os
import re
import sys
from typing import TextIO

import click

_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""All but tab and newline: those of terminals, and those that reverse the order of a text."""
_PICTURES = 0x2400
"""Where Unicode has a picture of each control character below 0x20."""
_DELETE = 0x7F


def visible(text: str) -> str:
    """A text that cannot control a terminal: each control character becomes a picture or a name,
    a carriage return nothing."""
    return _CONTROLS.sub(lambda match: _named(match[0]), text)


def shown(text: str, stream: TextIO | None = None) -> str:
    """As it is for a file or a program, which get every character; `visible` for a terminal.

    Args:
        stream: where it is written; None: standard output.
    """
    return visible(text) if (stream or sys.stdout).isatty() else text


def _named(control: str) -> str:
    code = ord(control)
    if control == "\r":
        return ""
    if code < 0x20:
        return chr(_PICTURES + code)
    return "\u2421" if code == _DELETE else f"<U+{code:04X}>"


class Screen:
    """Where a conversation is shown: standard output, and errors beside it."""

    def __init__(self) -> None:
        self.is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        """Whether input and output are a terminal."""
        self._in_colour = self.is_terminal and not os.environ.get("NO_COLOR")

    def answer(self, text: str) -> None:
        """Write a delta of the output, and flush it."""
        self._write(shown(text), sys.stdout)

    def say(self, text: str = "") -> None:
        """A line of ours; it may quote what others wrote."""
        self._write(f"{shown(text)}\n", sys.stdout)

    def hint(self, text: str) -> None:
        """Write a line to a terminal only."""
        if self.is_terminal:
            self._write(f"{self._styled(visible(text), dim=True)}\n", sys.stdout)

    def complain(self, error: Exception) -> None:
        line = f"error: {' '.join(shown(str(error), sys.stderr).split())}"
        self._write(f"{self._styled(line, fg='red')}\n", sys.stderr)

    def _styled(self, text: str, *, fg: str | None = None, dim: bool | None = None) -> str:
        return click.style(text, fg=fg, dim=dim) if self._in_colour else text

    def _write(self, text: str, stream: TextIO) -> None:
        """A character that the stream's encoding lacks is replaced."""
        encoding = stream.encoding or "utf-8"
        stream.write(text.encode(encoding, "replace").decode(encoding))
        stream.flush()
