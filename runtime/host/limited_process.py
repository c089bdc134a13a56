"""A process with hard limits of memory and time, for code and data that nobody vouches for.

It is a fresh interpreter, never a fork of this one, whose threads and gRPC would not survive that,
and it can import only the packages that it is given. It sees no environment and has no files. A
socket pair is its only way out, and its end: it stops when this process closes it, or dies.
"""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trtc.protos.errors import EnvironmentFault
from trtc.runtime.host.limited_child import LENGTH_BYTES, OUT_OF_MEMORY_STATUS

START_S = 30.0
"""Until a new process has answered its first request: 0.1 s on a machine that is not busy."""
_KEPT_ENVIRONMENT = ("TZ", "LD_LIBRARY_PATH")
_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false"}
"""The process may start no threads."""
_LAST_BREATH_S = 5.0
"""For a process whose socket is closed to have ended."""
_MAX_ANSWER_BYTES = 1 << 28


class ProcessEnded(Exception):
    """The process has gone over a limit, or has been ended."""


class OutOfTime(ProcessEnded):
    pass


class TimedOut(OutOfTime):
    """By the clock on the wall. It may not have had a CPU to run on."""


class OutOfMemory(ProcessEnded):
    pass


class LimitedProcess:
    """One process that runs `module`'s `main`; one thread may `call` at a time.

    Args:
        module: of this package's own; calls `limited_child.run`.
        packages: distributions' top-level packages that it imports.

    Raises:
        EnvironmentFault: it cannot be started.
    """

    def __init__(self, module: str, packages: Sequence[str]) -> None:
        paths = list(dict.fromkeys(_folder_of(name) for name in ("trtc", *packages)))
        code = (
            f"import sys; sys.path.extend({paths!r}); "
            f"from trtc.runtime.host.limited_child import run; from {module} import main; run(main)"
        )
        self._socket, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", code],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C is for this process, which then ends that one
                    env=_environment(),
                )
        except OSError as error:
            self._socket.close()
            raise EnvironmentFault(
                f"a process for untrusted code cannot be started ({error.strerror})",
                field=sys.executable,
            ) from error

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def call(self, request: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        """Send a request and wait for its answer; after an error the process is of no more use.

        Args:
            timeout: seconds of wall-clock time.

        Raises:
            TimedOut: it took longer than that.
            OutOfTime: it took more CPU time than it may.
            OutOfMemory: it took more memory than it may.
            ProcessEnded: it has ended for another reason.
        """
        deadline = time.monotonic() + timeout
        content = json.dumps(request).encode()
        try:
            self._wait_until(deadline)
            self._socket.sendall(len(content).to_bytes(LENGTH_BYTES, "little") + content)
            size = int.from_bytes(self._receive(LENGTH_BYTES, deadline), "little")
            if size > _MAX_ANSWER_BYTES:
                raise ProcessEnded(f"it gave an answer of {size} bytes")
            received = self._receive(size, deadline)
        except TimeoutError as error:
            raise TimedOut from error
        except OSError as error:
            raise self._reason() from error
        answer: dict[str, Any] = json.loads(received.decode("utf-8", "surrogatepass"))
        if answer["status"] == "memory":
            raise OutOfMemory
        return answer

    def kill(self) -> None:
        """End it at once, also from another thread than one that waits in `call`. Idempotent."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """End it and close its socket; no thread may be in `call`."""
        self.kill()
        self._socket.close()

    def _receive(self, size: int, deadline: float) -> bytes:
        content = bytearray(size)
        left = memoryview(content)
        while left:
            self._wait_until(deadline)
            received = self._socket.recv_into(left)
            if not received:
                raise ConnectionResetError
            left = left[received:]
        return bytes(content)

    def _wait_until(self, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._socket.settimeout(left)

    def _reason(self) -> ProcessEnded:
        """Why a process that has closed its socket did."""
        try:
            status = self._process.wait(_LAST_BREATH_S)
        except subprocess.TimeoutExpired:
            return ProcessEnded("it closed its socket")
        if status in (-signal.SIGPROF, -signal.SIGXCPU):
            return OutOfTime()
        if status == OUT_OF_MEMORY_STATUS:
            return OutOfMemory()
        return ProcessEnded(f"signal {-status}" if status < 0 else f"exit status {status}")


def _environment() -> dict[str, str]:
    kept = {name: os.environ[name] for name in _KEPT_ENVIRONMENT if name in os.environ}
    return {**_ENVIRONMENT, **kept}


def _folder_of(package: str) -> str:
    """The directory that a top-level package is imported from; importing nothing."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise EnvironmentFault(
            f"the package {package} is not installed", remedy=f"Run pip install {package}"
        )
    return str(Path(spec.origin).parent.parent)
