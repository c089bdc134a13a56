"""Process start to first token, of one tree of trtc or of several by turns.

    python -m examples.bench.start build/engine
    python -m examples.bench.start before=../before:../before/build/engine now=.:build/engine

A contestant is [NAME=TREE:]ENGINE: TREE is the directory of a checkout, ENGINE one that its
`trtc build` wrote. Every run is a process of its own, which is killed at its first token:

    worker     a Python process that opens the engine and completes token ids
    generate   `trtc generate`, with a text as prompt
    grpc       `trtc serve` and a client of trtc.v1, which sends token ids when the server is ready
    http       `trtc serve` and a stream of /v1/completions, sent when the server is ready

`cpu` is user and system time of the process, all its threads, until it was killed. Medians of
interleaved runs; the ratios are to the first contestant, run by run.
"""

import argparse
import http.client
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from examples.bench.peers.jobs import Job
from trtc.runtime.client import Client

TEXT = "def f("
TOKEN_IDS = list(range(10, 26))
MAX_TOKENS = 8
"""More than one: the last output of a completion waits until the weights are hashed."""


@dataclass(frozen=True)
class Contestant:
    name: str
    tree: Path
    engine: Path

    @classmethod
    def parse(cls, text: str) -> "Contestant":
        name, _, place = text.rpartition("=")
        tree, _, engine = place.rpartition(":")
        return cls(name or "engine", Path(tree or ".").absolute(), Path(engine).absolute())


@dataclass(frozen=True)
class Run:
    """Seconds until the first token."""

    wall: float
    cpu: float


class NoSuchPath(Exception):
    """The contestant's server has no such path on its HTTP port."""


Way = Callable[[Contestant], Run]


class Process:
    """`python -m ...` in a contestant's tree, from now until `first_token`."""

    def __init__(
        self, one: Contestant, *arguments: str, stdin: bytes = b"", logs: bool = False
    ) -> None:
        """
        Args:
            logs: read its stderr too, which is otherwise this process's.
        """
        self._began = time.perf_counter()
        self._popen = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            cwd=one.tree,
            # Bytecode is kept even where the environment forbids it: compiling takes half a start.
            env={**os.environ, "PYTHONPATH": str(one.tree), "PYTHONDONTWRITEBYTECODE": ""},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if logs else None,
        )
        assert self._popen.stdin is not None
        self._popen.stdin.write(stdin)
        self._popen.stdin.close()

    def read(self, until: bytes = b"") -> bytes:
        """Its next output, or the line that has `until`.

        Raises:
            RuntimeError: it ended before.
        """
        assert self._popen.stdout is not None
        said = b""
        while line := (self._popen.stdout.readline() if until else os.read(self._output, 4096)):
            if until in line:
                return line
            said += line
        raise RuntimeError(f"{self._popen.args!r} ended: {said.decode()}")

    @property
    def _output(self) -> int:
        assert self._popen.stdout is not None
        return self._popen.stdout.fileno()

    def first_token(self) -> Run:
        """It has given its first token: end it."""
        wall = time.perf_counter() - self._began
        cpu = self.end()
        return Run(wall, cpu)

    def end(self) -> float:
        """Kill it. Returns its CPU seconds."""
        self._popen.kill()
        _, status, usage = os.wait4(self._popen.pid, 0)
        self._popen.returncode = os.waitstatus_to_exitcode(status)
        assert self._popen.stdout is not None
        self._popen.stdout.close()
        return usage.ru_utime + usage.ru_stime


def worker(one: Contestant) -> Run:
    job = Job("first_token", str(one.engine), [TOKEN_IDS], MAX_TOKENS, threads=1, warmup=[])
    process = Process(one, "examples.bench.peers.trtc_worker", stdin=job.to_json().encode())
    process.read(b"\n")
    return process.first_token()


def generate(one: Contestant) -> Run:
    options = ("--prompt", TEXT, "--max-tokens", str(MAX_TOKENS), "--temperature", "0")
    process = Process(one, "trtc", "generate", str(one.engine), *options, "--threads", "1")
    process.read()
    return process.first_token()


def _ready_server(one: Contestant) -> tuple[Process, dict[str, str]]:
    """A server once it is ready, and the addresses of its ports by protocol."""
    options = ("--grpc-port", "0", "--http-port", "0", "--threads", "1")
    process = Process(one, "trtc", "serve", str(one.engine), *options, logs=True)
    words = process.read(b" serving ").decode().split()
    return process, dict(word.split("=", 1) for word in words if "=" in word)


def grpc(one: Contestant) -> Run:
    process, addresses = _ready_server(one)
    with Client(addresses["grpc"]) as client:
        next(client.generate(TOKEN_IDS, max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True))
        return process.first_token()


def http_stream(one: Contestant) -> Run:
    process, addresses = _ready_server(one)
    connection = http.client.HTTPConnection(addresses["http"])
    body = {"prompt": TOKEN_IDS, "max_tokens": MAX_TOKENS, "temperature": 0, "stream": True}
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    response = connection.getresponse()
    if response.status in (http.HTTPStatus.NOT_FOUND, http.HTTPStatus.NOT_IMPLEMENTED):
        process.end()
        raise NoSuchPath
    assert response.readline().startswith(b"data: {"), response.status
    return process.first_token()


WAYS: dict[str, Way] = {
    "worker": worker,
    "generate": generate,
    "grpc": grpc,
    "http": http_stream,
}


def measured(way: Way, contestants: list[Contestant], num_runs: int) -> dict[str, list[Run]]:
    """Runs of each contestant that knows the way, one after another; a round before them warms
    the page cache and writes bytecode."""
    able = []
    for one in contestants:
        with suppress(NoSuchPath):
            way(one)
            able.append(one)
    runs: dict[str, list[Run]] = {one.name: [] for one in able}
    for number in range(num_runs):
        for one in able if number % 2 else reversed(able):
            runs[one.name].append(way(one))
    return runs


def report(name: str, runs: dict[str, list[Run]]) -> None:
    first = next(iter(runs.values()))
    for contestant, own in runs.items():
        line = f"{name:9} {contestant:12}"
        for figure in ("wall", "cpu"):
            values = [getattr(run, figure) for run in own]
            pairs = zip(values, (getattr(run, figure) for run in first), strict=True)
            ratio = statistics.median(value / other for value, other in pairs)
            low, *_, high = statistics.quantiles(values, n=4)
            line += f"  {figure} {statistics.median(values) * 1e3:6.1f} ms"
            line += f" (quartiles {low * 1e3:.1f} to {high * 1e3:.1f}), {ratio:.3f}x"
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "contestants", nargs="+", type=Contestant.parse, metavar="[NAME=TREE:]ENGINE"
    )
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--runs", type=int, default=25, help="of each contestant and way")
    chosen = parser.parse_args()
    for name in chosen.ways:
        report(name, measured(WAYS[name], chosen.contestants, chosen.runs))


if __name__ == "__main__":
    main()
