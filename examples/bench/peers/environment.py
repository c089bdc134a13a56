"""The environment of the peers: a virtual environment of their own under the work directory."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from examples.bench.peers.failures import Unavailable
from examples.bench.peers.processes import run_step


@dataclass(frozen=True)
class PeerEnvironment:
    """Made on demand; installing what is there already costs a second."""

    directory: Path
    log: Path

    @property
    def python(self) -> Path:
        return self.directory / "bin" / "python"

    def make(self) -> None:
        """Raises Unavailable when this Python cannot make environments."""
        if not self.python.exists():
            run_step([sys.executable, "-m", "venv", self.directory], self.log)

    def pip(self, *arguments: str | Path) -> None:
        """Raises Unavailable with pip's last words."""
        self.make()
        run_step([self.python, "-m", "pip", "--disable-pip-version-check", *arguments], self.log)

    def has(self, requirements: Sequence[str]) -> bool:
        """Whether every `name==version` is installed."""
        return self.python.exists() and all(
            self.version(name) == version
            for name, version in (one.split("==") for one in requirements)
        )

    def install(self, requirements: Sequence[str]) -> None:
        """Install `name==version` requirements that are not there yet."""
        if not self.has(requirements):
            self.pip("install", "--quiet", *requirements)

    def version(self, package: str) -> str:
        """Of an installed package; "" if it is not installed. Local suffixes are left out."""
        question = (
            "import importlib.metadata as m, json, sys\n"
            "try: v = m.version(sys.argv[1])\n"
            "except m.PackageNotFoundError: v = ''\n"
            "print(json.dumps(v))"
        )
        done = subprocess.run(
            [self.python, "-c", question, package], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise Unavailable(f"{self.python} does not run: {done.stderr.strip()[-200:]}")
        return str(json.loads(done.stdout)).split("+")[0]
