"""A program at a real terminal (a pty), typed into and read by a test."""

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

PATIENCE_S = 60.0
_PRESS_AGAIN_S = 5.0
_ROWS_COLUMNS = (24, 400)
"""Wide enough that no line is wrapped."""


class Terminal:
    def __init__(self, process: "subprocess.Popen[bytes]", master: int) -> None:
        self.process = process
        self._master = master
        self.seen = b""
        """All that the program has written."""
        self._read = 0

    def type(self, text: str | bytes) -> None:
        os.write(self._master, text.encode() if isinstance(text, str) else text)

    def until(self, text: str | bytes) -> str:
        """What comes up to `text`, after what was read before."""
        wanted = text.encode() if isinstance(text, str) else text
        deadline = time.monotonic() + PATIENCE_S
        while (found := self.seen.find(wanted, self._read)) < 0:
            assert self._more(deadline), f"{wanted!r} does not come: {self.seen[self._read :]!r}"
        piece = self.seen[self._read : found]
        self._read = found + len(wanted)
        return piece.decode()

    def interrupt(self, answer: str) -> str:
        """What comes up to `answer`, after Ctrl-C at a prompt.

        A program between its prompt and its wait for input sees the signal only with the next
        key, because `select` is not interrupted by a signal that came before it. So Ctrl-C is
        pressed again where nothing happens, as a user would.
        """
        deadline = time.monotonic() + PATIENCE_S
        press = True
        while self.seen.find(answer.encode(), self._read) < 0:
            assert time.monotonic() < deadline, f"{answer!r} does not come"
            if press:
                self.type("\x03")
            press = not self._more(time.monotonic() + _PRESS_AGAIN_S)
        return self.until(answer)

    def something(self) -> str:
        """Whatever comes next, that is more than the end of a line."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.seen[self._read :].strip():
            assert self._more(deadline), f"nothing comes after {self.seen[-300:]!r}"
        piece = self.seen[self._read :]
        self._read = len(self.seen)
        return piece.decode(errors="replace")

    def end(self) -> int:
        """The exit status, after reading the rest."""
        deadline = time.monotonic() + PATIENCE_S
        while self._more(deadline):
            pass
        return self.process.wait(PATIENCE_S)

    def _more(self, deadline: float) -> bool:
        ready, _, _ = select.select([self._master], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return False
        try:
            piece = os.read(self._master, 65536)
        except OSError:  # EIO: nobody has the other side
            return False
        self.seen += piece
        return bool(piece)


@contextmanager
def trtc_at_terminal(*arguments: str | Path, env: Mapping[str, str]) -> Iterator[Terminal]:
    """`trtc` at a terminal of its own, whose Ctrl-C reaches it as SIGINT."""
    command = [sys.executable, "-m", "trtc", *map(str, arguments)]
    with at_terminal(command, env=env) as terminal:
        yield terminal


@contextmanager
def at_terminal(command: Sequence[str], *, env: Mapping[str, str]) -> Iterator[Terminal]:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", *_ROWS_COLUMNS, 0, 0))
    process = subprocess.Popen(
        # setsid --ctty: a session of its own, whose controlling terminal is this one. A shell's
        # background jobs ignore SIGINT, and so would what they start.
        ["env", "--default-signal=INT", "setsid", "--ctty", "--wait", *command],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**os.environ, "TERM": "xterm", "LC_ALL": "C.UTF-8", **env},
    )
    os.close(slave)
    try:
        yield Terminal(process, master)
    finally:
        process.kill()
        process.wait()
        os.close(master)
