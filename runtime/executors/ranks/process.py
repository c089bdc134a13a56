"""The process of a rank other than 0, as rank 0 sees it."""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

from trtc.runtime.executors.ranks.link import Link
from trtc.runtime.executors.ranks.messages import Answer

_LAST_WORDS_S = 1.0


class RankProcess:
    """A process that can import what this one can, with one end of a socket pair.

    It has a session of its own: Ctrl-C is for rank 0, which ends the others. It was
    not forked from a process that has used CUDA: it begins anew.
    """

    def __init__(self, number: int, command: Sequence[str], timeout: float) -> None:
        """Start it.

        Args:
            command: the number of its socket is appended.
            timeout: seconds that a message may wait to be taken.

        Raises:
            OSError: the system refuses.
        """
        self.number = number
        ours, theirs = socket.socketpair()
        ours.settimeout(timeout)
        self.link: Link[Answer] = Link(ours, Answer)
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [*command, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=2,  # standard output is rank 0's
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                )
        except OSError:
            ours.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        self._process.kill()

    def end(self, timeout: float) -> None:
        """Wait until it has ended, or kill it."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.link.close()

    def how_it_ended(self) -> str:
        """Of a process that has closed its socket."""
        with suppress(subprocess.TimeoutExpired):
            status = self._process.wait(_LAST_WORDS_S)
            return f"was ended by signal {-status}" if status < 0 else f"ended, status {status}"
        return "has closed its socket"
