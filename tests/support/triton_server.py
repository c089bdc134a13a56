"""NVIDIA's Triton Inference Server itself, out of the wheel nvidia-pytriton, on this machine.

The server starts a stub process for each Python model. The stub is made for one Python version,
loads that version's libpython, and finds its packages by the `python3` that is first on PATH: the
virtual environment that runs the tests, which has NumPy 1, as this release of the server needs.
"""

import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

START_S = 60.0
STOP_S = 15
_ATTEMPTS = 3


@dataclass(frozen=True)
class Installation:
    server: Path
    """Directory of the wheel's server."""
    libraries: tuple[Path, ...]
    """Directories that the server and the stub load from."""

    @property
    def stub(self) -> Path:
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        return self.server / "python_backend_stubs" / python / "triton_python_backend_stub"


def find_installation() -> Installation:
    """Skips, with the reason, where the server or what it needs is missing."""
    spec = find_spec("pytriton")
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip("make test-triton installs the server")
    package = Path(next(iter(spec.submodule_search_locations)))
    if int(version("numpy").partition(".")[0]) > 1:
        pytest.skip(f"the server needs NumPy 1, which Python {sys.version} has no wheel of")
    libpython = sysconfig.get_config_var("INSTSONAME") or "libpython"
    folders = (Path(sysconfig.get_config_var("LIBDIR") or ""), Path(sys.base_prefix) / "lib")
    holders = [folder for folder in folders if (folder / libpython).is_file()]
    if not holders or not libpython.startswith("libpython") or ".so" not in libpython:
        pytest.skip(
            f"{sys.executable} comes without a shared libpython, which Triton's Python backend "
            "loads (Debian: apt-get install libpython3-dev; pyenv: --enable-shared)"
        )
    libraries = (package.parent / "nvidia_pytriton.libs", holders[0])
    installation = Installation(package / "tritonserver", libraries)
    if not installation.stub.is_file():
        pytest.skip(f"the server's wheel has no Python backend for Python {sys.version}")
    return installation


@dataclass(frozen=True)
class TritonServer:
    """A server that is ready; ports are on 127.0.0.1."""

    grpc_port: int
    http_port: int
    metrics_port: int

    def metric(self, name: str, model: str) -> float:
        """A metric of a model's version 1, as Prometheus would read it."""
        wanted = f'{name}{{model_name="{model}",version="1"}} '
        for line in self._read(self.metrics_port, "/metrics").splitlines():
            if line.startswith(wanted):
                return float(line.removeprefix(wanted))
        raise AssertionError(f"no metric {wanted}")

    def post(self, path: str, body: str) -> str:
        """The answer to an HTTP request; of whichever status."""
        return self._read(self.http_port, path, body.encode())

    def _read(self, port: int, path: str, body: bytes | None = None) -> str:
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data=body)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return str(response.read().decode())
        except urllib.error.HTTPError as error:
            return str(error.read().decode())


@contextmanager
def triton_server(
    repository: Path, work: Path, *, python: Path | None = None
) -> Iterator[TritonServer]:
    """A server of a model repository.

    Args:
        work: an empty directory for its files.
        python: prefix of the Python environment of the models; None: this process's own.
    """
    with _started(repository, work, python) as (process, server, log):
        assert process is not None, log.read_text()
        yield server


def why_it_does_not_start(repository: Path, work: Path, *, python: Path | None = None) -> str:
    """The log of a server that must not come up."""
    with _started(repository, work, python) as (process, _, log):
        assert process is None, "it came up"
        return log.read_text()


@contextmanager
def _started(
    repository: Path, work: Path, python: Path | None
) -> Iterator[tuple["subprocess.Popen[bytes] | None", TritonServer, Path]]:
    """The process, or None if it ended by itself; it is stopped on the way out."""
    installation = find_installation()
    backends = work / "backends"
    shutil.copytree(installation.server / "backends", backends)
    shutil.copy(installation.stub, backends / "python")
    log = work / "server.log"
    for _ in range(_ATTEMPTS):  # another process may take a port between its choice and its use
        server = TritonServer(*_free_ports(3))
        with log.open("wb") as file:
            process = subprocess.Popen(
                _command(installation, server, repository, backends),
                stdout=file,
                stderr=subprocess.STDOUT,
                env=_environment(installation, python or Path(sys.prefix)),
            )
        try:
            came_up = _wait_until_ready(process, server)
            if came_up or "Address already in use" not in log.read_text():
                yield (process if came_up else None), server, log
                return
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    raise AssertionError(log.read_text())


def _command(
    installation: Installation, server: TritonServer, repository: Path, backends: Path
) -> list[str]:
    options = {
        "model-repository": repository,
        "backend-directory": backends,
        "grpc-address": "127.0.0.1",
        "grpc-port": server.grpc_port,
        "http-address": "127.0.0.1",
        "http-port": server.http_port,
        "metrics-address": "127.0.0.1",
        "metrics-port": server.metrics_port,
        "allow-gpu-metrics": "false",
        "exit-timeout-secs": STOP_S - 5,
    }
    binary = installation.server / "bin" / "tritonserver"
    return [str(binary), *(f"--{name}={value}" for name, value in options.items())]


def _environment(installation: Installation, python: Path) -> dict[str, str]:
    return os.environ | {
        "PATH": f"{python / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "LD_LIBRARY_PATH": os.pathsep.join(map(str, installation.libraries)),
    }


def _wait_until_ready(process: "subprocess.Popen[bytes]", server: TritonServer) -> bool:
    """Whether it came up, rather than ended."""
    deadline = time.monotonic() + START_S
    url = f"http://127.0.0.1:{server.http_port}/v2/health/ready"
    while process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return True
        except OSError:
            assert time.monotonic() < deadline, "the server neither came up nor ended"
            time.sleep(0.05)
    return False


def _free_ports(number: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
