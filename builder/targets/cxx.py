"""The system's C++ compiler: found, tried on a small program, and run so that it is repeatable."""

import os
import platform
import shlex
import shutil
import signal
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from trtc.builder.targets.processes import Children
from trtc.plugins.cpu.isa import CXX_FLAGS, ISAS
from trtc.protos.errors import EnvironmentFault, InvariantError, OutputError

_CANDIDATES = ("c++", "g++", "clang++")
_REMEDY = "Install g++ 11 or newer (Debian: apt-get install g++), or set CXX"
_TRIAL = "#include <atomic>\n#include <bit>\nint f(std::atomic<int>& a) { a.wait(1); return a; }\n"

_ENVIRONMENT = {"LC_ALL": "C"}
_DISK_MESSAGES = (
    "No space left",
    "File too large",
    "File size limit exceeded",
    "Disk quota exceeded",
)
_FLAGS = (*CXX_FLAGS, "-fno-trapping-math", "-fvisibility=hidden", "-pipe", "-w")
_LINK_FLAGS = (
    # An engine may run on a machine with an older or no C++ runtime library.
    "-static-libstdc++",
    "-static-libgcc",
    "-Wl,--exclude-libs,ALL",
    "-Wl,--build-id=none",
    "-Wl,-z,defs",
)


@dataclass(frozen=True)
class Compiler:
    command: tuple[str, ...]
    version: str
    """`g++ 12.2.0 (x86_64)`: goes into the manifest, so it has no path."""

    def check(self, isa: str) -> None:
        """Try the flags of a level on a small program.

        Raises:
            EnvironmentFault: the compiler is too old, or is for another machine.
        """
        command = [*self.command, *_FLAGS, *ISAS[isa].compiler_flags]
        command += ["-fsyntax-only", "-x", "c++", "-"]
        result = _run(command, input_text=_TRIAL)
        if result.returncode != 0:
            raise EnvironmentFault(
                f"{self.version} cannot compile C++20 for {isa}: {_first_error(result.stderr)}",
                field="--target",
                remedy=_REMEDY,
            )

    def build(
        self,
        source: Path,
        isa: str,
        include: Path,
        output: Path,
        optimization: str,
        children: Children,
    ) -> None:
        """Compile one source file into a shared object; the same input gives the same bytes.

        Args:
            children: where the compiler runs.

        Raises:
            OutputError: the disk is full.
            EnvironmentFault: the compiler was killed (out of memory).
            InvariantError: the generated code is wrong.
        """
        with tempfile.TemporaryDirectory(dir=source.parent, prefix=".cxx-") as scratch:
            command = [
                *self.command,
                *_FLAGS,
                optimization,
                *ISAS[isa].compiler_flags,
                f'-DTRTC_ISA="{isa}"',
                f"-ffile-prefix-map={source.parent}=.",
                f"-ffile-prefix-map={include}=plugins",
                f"-I{include}",
                *_LINK_FLAGS,
                source.name,
                "-o",
                str(output),
            ]
            environment = _ENVIRONMENT | {"TMPDIR": scratch}
            result = children.run(command, cwd=source.parent, environment=os.environ | environment)
        if result.returncode == 0:
            return
        if _is_disk_error(result):
            raise OutputError(
                f"{self.version} cannot write the code: the disk is full, or `ulimit -f` is small",
                field="--output",
                remedy="Free some space; nothing was left behind",
            )
        if result.returncode < 0 or "Killed" in result.stderr:
            raise EnvironmentFault(
                f"{self.version} was killed while compiling, probably for want of memory",
                field="--target",
                remedy="Free some memory, or build on a larger machine",
            )
        raise InvariantError(
            f"{self.version} rejects the generated code for {isa}: {_first_error(result.stderr)}"
        )


def find_compiler() -> Compiler:
    """$CXX, else the first of c++, g++, clang++ on the path.

    Raises:
        EnvironmentFault: there is none, or $CXX does not run.
    """
    wanted = os.environ.get("CXX", "")
    commands = [tuple(shlex.split(wanted))] if wanted else [(name,) for name in _CANDIDATES]
    for command in commands:
        if shutil.which(command[0]) is None:
            continue
        result = _run([*command, "-dumpfullversion", "-dumpversion"])
        if result.returncode == 0:
            brand = _run([*command, "--version"]).stdout.lower()
            name = "clang++" if "clang" in brand else "g++"
            version = f"{name} {result.stdout.strip()} ({platform.machine()})"
            return Compiler(command, version)
    raise EnvironmentFault(
        f"CXX={wanted} does not run" if wanted else "no C++ compiler on this machine",
        field="--target",
        remedy=_REMEDY,
    )


def _run(command: list[str], *, input_text: str | None = None) -> subprocess.CompletedProcess[str]:
    """For commands that end in an instant."""
    with Children() as children:
        return children.run(command, input_text=input_text, environment=os.environ | _ENVIRONMENT)


def _is_disk_error(result: subprocess.CompletedProcess[str]) -> bool:
    status = abs(result.returncode)
    return status in (signal.SIGXFSZ, 128 + signal.SIGXFSZ) or any(
        message in result.stderr for message in _DISK_MESSAGES
    )


def _first_error(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if "error: " in line]
    return lines[0] if lines else (stderr.strip().splitlines() or ["no message"])[-1]
