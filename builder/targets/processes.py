"""Compilers as child processes that end with the build that started them."""

import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from trtc.protos.errors import InvariantError


class Children:
    """Runs commands from any thread; what still runs when the block ends is killed.

    Each command gets a process group of its own, because a compiler's driver starts others and
    takes none of them along when it is killed.
    """

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[str]] = set()
        self._is_closed = False
        self._guard = threading.Lock()

    def __enter__(self) -> "Children":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._guard:
            self._is_closed = True
            for process in self._running:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    def run(
        self,
        command: Sequence[str],
        *,
        input_text: str | None = None,
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """As subprocess.run with captured text."""
        with self._guard:
            if self._is_closed:
                raise InvariantError(f"{command[0]} is started after its block has ended")
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL if input_text is None else subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=cwd,
                env=environment,
                text=True,
                errors="replace",
                process_group=0,
            )
            self._running.add(process)
        try:
            output, errors = process.communicate(input_text)
        finally:
            # Of a process that has been waited for, the number may be another's by now.
            with self._guard:
                self._running.discard(process)
                if process.returncode is None:
                    os.killpg(process.pid, signal.SIGKILL)
        return subprocess.CompletedProcess(command, process.returncode, output, errors)
