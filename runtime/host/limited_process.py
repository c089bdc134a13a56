"""A process with hard limits of memory and time, for untrusted code and data.

It is a new interpreter, not a fork, which would not work with threads and gRPC. It can import only
the given packages, has no environment variables and no open files. Its only connection is a socket
pair, and it exits when this process closes the socket or dies.
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
"""Seconds until a new process must have answered its first request; usually it takes 0.1 s."""
_KEPT_ENVIRONMENT = ("TZ", "LD_LIBRARY_PATH")
_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false"}
"""The process cannot start threads."""
_LAST_BREATH_S = 5.0
"""Seconds for a process to exit after its socket was closed."""
_MAX_ANSWER_BYTES = 1 << 28


class ProcessEnded(Exception):
    """The process has exceeded a limit, or has exited."""


class OutOfTime(ProcessEnded):
    pass


class TimedOut(OutOfTime):
    """By the clock on the wall. It may not have had a CPU to run on."""


class OutOfMemory(ProcessEnded):
    pass


class LimitedProcess:
    """One process that runs `module`'s `main`; one thread may `call` at a time.

    Args:
        module: a module of this package, whose `main` uses `limited_child.serve`.
        packages: top-level packages that it imports.

    Raises:
        EnvironmentFault: the process cannot be started.
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
        """Send a request and wait for its answer; after an error the process cannot be used again.

        Args:
            timeout: seconds of wall-clock time.

        Raises:
            TimedOut: it took longer than that.
            OutOfTime: the call exceeded the limit of CPU time.
            OutOfMemory: the call exceeded the limit of memory.
            ProcessEnded: the process has exited for another reason.
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
        """End the process at once. Thread-safe, also during `call`. Idempotent."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """End the process and close its socket; no thread may be in `call`."""
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
        """The reason why the process has closed its socket."""
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
    """The directory that a top-level package would be imported from."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise EnvironmentFault(
            f"the package {package} is not installed", remedy=f"Run pip install {package}"
        )
    return str(Path(spec.origin).parent.parent)
