"""A process that has Triton at hand, which takes longer to start than a kernel to compile."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

from trtc.protos.errors import InvariantError


class TritonProcess:
    """Starts with the first question, and ends with the block. For one thread at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the process)

    def __enter__(self) -> "TritonProcess":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """A kernel under way is waited for."""
        self._errors.close()
        if self._process is not None:
            self._process.communicate()
            self._process = None

    def ask(self, requests: Sequence[Mapping[str, Any]], names: str) -> list[dict[str, Any]]:
        """What triton_worker.py answers, compiling one after the other for one SM.

        Raises:
            InvariantError: Triton refuses one; `names` says of which kernels.
        """
        if self._process is None:
            self._process = self._start()
        assert self._process.stdin is not None and self._process.stdout is not None
        self._errors.seek(0)
        self._errors.truncate()
        with suppress(BrokenPipeError):  # it has ended, and said why
            self._process.stdin.write(json.dumps(requests) + "\n")
            self._process.stdin.flush()
        answers: list[dict[str, Any]] = json.loads(self._process.stdout.readline() or "[]")
        if not answers:
            self._errors.seek(0)
            reason = (self._errors.read().strip().splitlines() or ["no reason given"])[-1]
            raise InvariantError(f"Triton refuses the kernel: {reason}", field=names)
        return answers

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "trtc.builder.targets.gpu.triton_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
