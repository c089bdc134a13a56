"""What the examples share: where the bundled model is, and a server for as long as one needs it."""

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MODEL = Path(__file__).parent / "models" / "pyllama"
PROMPT = "import os\n\ndef "


def chosen_model() -> Path:
    """The command line's `--model`; the bundled one by default."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, default=MODEL, help="a checkpoint's directory")
    chosen: Path = parser.parse_args().model
    return chosen


def trtc(*arguments: str | Path) -> None:
    """Run a `trtc` command with this Python and show it as one would type it."""
    print(f"\n$ trtc {' '.join(map(str, arguments))}", flush=True)
    subprocess.run([sys.executable, "-m", "trtc", *map(str, arguments)], check=True)


@contextmanager
def serving(*arguments: str | Path, python: str | Path = sys.executable) -> Iterator[str]:
    """`trtc serve` on a free port; yields its address and ends it with SIGTERM."""
    command = ["serve", *map(str, arguments), "--grpc-port", "0", "--http-port", "0"]
    print(f"\n$ trtc {' '.join(command)}", flush=True)
    server = subprocess.Popen(
        [str(python), "-m", "trtc", *command], stderr=subprocess.PIPE, text=True
    )
    try:
        yield _address(server)
    finally:
        server.terminate()
        server.communicate(timeout=60)


def _address(server: subprocess.Popen[str]) -> str:
    assert server.stderr is not None
    said = []
    for line in server.stderr:
        said.append(line)
        if found := re.search(r"grpc.*?(127\.0\.0\.1:\d+)", line):
            return found[1]
    raise SystemExit("the server ended before it was ready:\n" + "".join(said))
