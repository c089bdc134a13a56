"""Starting what is measured: commands and servers, their output, clocks and peak memory."""

import http.client
import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.bench.peers.failures import RunFailed, Unavailable

ROOT = Path(__file__).parents[3]
"""Where `python -m examples...` finds this package."""
Command = list[str | Path]
_POLL_S = 0.02
_END_S = 30.0


@dataclass(frozen=True)
class Finished:
    """A command that ended well."""

    stdout: str
    stderr: str
    seconds: float
    peak_rss: int
    """Bytes; the kernel's high-water mark, read shortly before the end."""

    def last_json(self) -> Any:
        """The last line, which the workers keep for their answer."""
        return json.loads(self.stdout.strip().splitlines()[-1])


def run_step(
    command: Sequence[str | Path], log: Path, env: Mapping[str, str] | None = None
) -> None:
    """One step of an installation or a conversion; what it says goes to `log`.

    Raises:
        Unavailable: it failed, with its last words.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    line = " ".join(map(str, command))
    with log.open("a") as output:
        print(f"$ {line}", file=output, flush=True)
        try:
            done = subprocess.run(
                [str(part) for part in command],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                check=False,
            )
        except OSError as failure:
            raise Unavailable(f"{command[0]}: {failure.strerror}") from failure
    if done.returncode:
        raise Unavailable(f"`{line[:120]}` ended with {done.returncode}: {last_line(log)} ({log})")


def last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:200] if lines else "it said nothing"


def run(command: Sequence[str | Path], *, stdin: str = "") -> Finished:
    """Run a command to its end.

    Raises:
        RunFailed: it ended with another status than 0.
    """
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as complaints:
        began = time.perf_counter()
        process = _start(command, stdin, said, complaints)
        peak = 0
        while process.poll() is None:
            peak = max(peak, peak_rss(process.pid))
            time.sleep(_POLL_S)
        seconds = time.perf_counter() - began
        said.seek(0)
        complaints.seek(0)
        problems = complaints.read()
        if process.returncode:
            _fail(command, process.returncode, problems)
        return Finished(said.read(), problems, seconds, peak)


def lines(command: Command, *, stdin: str = "") -> Iterator[str]:
    """What a command prints, line by line as it comes.

    Raises:
        RunFailed: it ended with another status than 0.
    """
    with tempfile.TemporaryFile("w+") as complaints:
        process = _start(command, stdin, subprocess.PIPE, complaints)
        assert process.stdout is not None
        with process.stdout as said:
            yield from said
        if process.wait():
            complaints.seek(0)
            _fail(command, process.returncode, complaints.read())


def seconds_to_first_line(command: Sequence[str | Path], *, stdin: str = "") -> float:
    """From starting a process to the first line that it prints.

    Raises:
        RunFailed: it ended without one.
    """
    with tempfile.TemporaryFile("w+") as complaints:
        began = time.perf_counter()
        process = _start(command, stdin, subprocess.PIPE, complaints)
        assert process.stdout is not None
        line = process.stdout.readline()
        seconds = time.perf_counter() - began
        process.communicate()
        if not line or process.returncode:
            complaints.seek(0)
            _fail(command, process.returncode, complaints.read())
        return seconds


def _start(
    command: Sequence[str | Path], stdin: str, stdout: Any, stderr: Any
) -> subprocess.Popen[str]:
    """`stdin` goes through a file, because a pipe may be smaller than it."""
    with tempfile.TemporaryFile("w+") as given:
        given.write(stdin)
        given.seek(0)
        return subprocess.Popen(
            [str(part) for part in command],
            stdin=given,
            stdout=stdout,
            stderr=stderr,
            text=True,
            env=python_env(),
        )


@dataclass(frozen=True)
class Server:
    """A running server process."""

    process: subprocess.Popen[bytes]
    started_at: float
    """time.perf_counter() just before the start."""

    def peak_rss(self) -> int:
        return peak_rss(self.process.pid)

    def seconds_since_start(self) -> float:
        return time.perf_counter() - self.started_at


@contextmanager
def serving(
    command: Sequence[str | Path], is_ready: Callable[[], bool], *, timeout: float = 120.0
) -> Iterator[Server]:
    """A server from before it is ready until SIGTERM.

    Raises:
        RunFailed: it ended, or was not ready within `timeout` seconds.
    """
    with tempfile.TemporaryFile("w+") as output:
        began = time.perf_counter()
        process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=python_env(),
        )
        try:
            while not is_ready():
                if process.poll() is not None or time.perf_counter() - began > timeout:
                    output.seek(0)
                    _fail(command, process.returncode, output.read())
                time.sleep(0.002)
            yield Server(process, began)
        finally:
            process.terminate()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def http_ok(port: int, path: str) -> bool:
    """Whether a server on loopback answers 200 there now."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5.0)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def free_port() -> int:
    """A port of loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def peak_rss(pid: int) -> int:
    """VmHWM in bytes; 0 for a process that has ended.

    getrusage would not do: a child's figure there starts at its parent's size.
    """
    return _memory(pid, "VmHWM")


def current_rss(pid: int) -> int:
    """VmRSS in bytes; 0 for a process that has ended."""
    return _memory(pid, "VmRSS")


def _memory(pid: int, name: str) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    for line in status.splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


def python_env() -> dict[str, str]:
    """This environment, in which Python finds the package of the workers."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def _fail(command: Sequence[str | Path], status: int | None, complaints: str) -> None:
    words = complaints.strip().splitlines()[-3:] or ["it said nothing"]
    ended = "was not ready in time" if status is None else f"ended with {status}"
    raise RunFailed(f"`{' '.join(map(str, command))[:160]}` {ended}: {' / '.join(words)}")
