"""The process of a rank other than 0, started by rank 0."""

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
    """A process with the same import paths, connected by a socket pair.

    It has a session of its own, so that only rank 0 gets Ctrl-C, and ends the others. It is not
    forked, because CUDA does not work in forks of a process that has used it.
    """

    def __init__(self, number: int, command: Sequence[str], timeout: float) -> None:
        """Start the process.

        Args:
            command: its command; the number of its socket is appended.
            timeout: seconds that sending a message may take.

        Raises:
            OSError: the process cannot be started.
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
        """Wait for its exit, and kill it after `timeout` seconds."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.link.close()

    def how_it_ended(self) -> str:
        """Describe the end of a process that has closed its socket."""
        with suppress(subprocess.TimeoutExpired):
            status = self._process.wait(_LAST_WORDS_S)
            return f"was ended by signal {-status}" if status < 0 else f"ended, status {status}"
        return "has closed its socket"
