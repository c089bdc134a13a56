"""Several models on one GPU: loaded beside each other, refused, asleep, awake, unloaded.

    python -m examples.bench.gpu_models ENGINE --kv-bytes 4000000000

Copies ENGINE twice into a directory of models (hard links where the file system has them), serves
it, and looks at tokens and at the memory of the GPU at each step. Prints a JSON document; the
status is 1 if something is wrong. An engine for CPUs is served as well, without looking at memory.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from examples.bench.served import TrtcServer, trtc_models
from examples.bench.soak import gpu_bytes
from trtc.protos.manifest import read_manifest
from trtc.runtime.client import Client

PROMPTS = ((5, 17, 9), (11, 3), (40, 41, 42, 43))
MAX_TOKENS = 48
SLACK_BYTES = 256 << 20
"""The driver keeps some of what a context has used."""


class Checks:
    """What was measured, and what is wrong with it."""

    def __init__(self, server: TrtcServer, looks_at_gpu: bool) -> None:
        self._server = server
        self._looks_at_gpu = looks_at_gpu
        self.steps: list[dict[str, Any]] = []
        self.problems: list[str] = []

    def step(self, name: str, **facts: Any) -> int:
        """Note a step; the bytes of the GPU that are in use after it."""
        used = gpu_bytes() if self._looks_at_gpu else 0
        self.steps.append({"step": name, "gpu_bytes": used, **facts})
        return used

    def expect(self, holds: bool, problem: str) -> None:
        if not holds:
            self.problems.append(problem)

    def order(self, path: str, body: object = None) -> Any:
        data = b"" if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        url = f"http://127.0.0.1:{self._server.http_port}{path}"
        request = urllib.request.Request(url, data, headers, method="POST")
        with urllib.request.urlopen(request, timeout=600) as answer:
            said = answer.read()
        return json.loads(said) if said else None

    def tokens(self, model: str) -> list[list[int]]:
        with Client(self._server.address) as client:
            running = [
                client.generate(
                    prompt, model=model, max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True
                )
                for prompt in PROMPTS
            ]
            return [list(one.result().token_ids) for one in running]


def run(engine: Path, models: Path, kv_bytes: int) -> Checks:
    for name in ("a", "b"):
        shutil.copytree(engine, models / name, copy_function=_link_or_copy)
    options = ("--explicit", "--load", "a", "--kv-bytes", str(kv_bytes))
    kind = read_manifest(engine).target.kind
    with trtc_models(models, *options) as server:
        checks = Checks(server, looks_at_gpu=kind != "cpu")
        alone = checks.step("a is loaded")
        expected = checks.tokens("a")
        _load_beside(checks, expected, alone, kv_bytes)
        for level in (1, 2) if kind in ("cpu", "cuda") else (2,):
            _sleep(checks, level, expected, kv_bytes)
    return checks


def _load_beside(checks: Checks, expected: list[list[int]], alone: int, kv_bytes: int) -> None:
    try:
        checks.order("/v2/repository/models/b/load", {"parameters": {"kv_bytes": 10**15}})
        checks.expect(holds=False, problem="a pool of 1 PB was not refused")
    except urllib.error.HTTPError as error:
        checks.step("b does not fit", said=error.read().decode())
    checks.order("/v2/repository/models/b/load")
    beside = checks.step("b is loaded")
    for model in ("a", "b"):
        checks.expect(checks.tokens(model) == expected, f"{model} gives other tokens beside others")
    checks.order("/v2/repository/models/b/unload")
    left = checks.step("b is unloaded")
    if beside:
        checks.expect(beside - alone > kv_bytes, "b took less than its pool")
        checks.expect(left - alone < SLACK_BYTES, f"b left {left - alone:,} bytes on the GPU")
    checks.expect(checks.tokens("a") == expected, "a gives other tokens once b is unloaded")


def _sleep(checks: Checks, level: int, expected: list[list[int]], kv_bytes: int) -> None:
    awake = checks.step(f"before level {level}")
    asleep = checks.step(f"level {level}", **checks.order(f"/sleep?level={level}")["slept"][0])
    if awake:
        checks.expect(awake - asleep > kv_bytes, f"level {level} gave back less than the pool")
    checks.step(f"awake from level {level}", **checks.order("/wake_up")["woken"][0])
    checks.expect(checks.tokens("a") == expected, f"other tokens after level {level}")


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--kv-bytes", type=int, default=2_000_000_000)
    arguments = parser.parse_args()
    engine = arguments.engine.resolve()
    with tempfile.TemporaryDirectory(dir=engine.parent, prefix=".models-") as models:
        checks = run(engine, Path(models), arguments.kv_bytes)
    document = {"steps": checks.steps, "problems": checks.problems}
    sys.stdout.write(json.dumps(document, indent=1) + "\n")
    return 1 if checks.problems else 0


if __name__ == "__main__":
    sys.exit(main())
