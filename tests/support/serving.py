"""`trtc serve` in a process of its own."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

OPTIONS = ("--threads", "1", "--kv-bytes", "16000000", "--grpc-port", "0", "--http-port", "0")


class Serving:
    """`trtc serve` in a process of its own."""

    def __init__(self, *arguments: str | Path, log_imports: bool = False) -> None:
        """
        Args:
            log_imports: whether the log has a line for each module, when it has been imported.
        """
        self.process = subprocess.Popen(
            [sys.executable, "-m", "trtc", "serve", *OPTIONS, *map(str, arguments)],
            env={**os.environ, **({"PYTHONPROFILEIMPORTTIME": "1"} if log_imports else {})},
            stderr=subprocess.PIPE,
            text=True,
        )
        self.log: list[str] = []

    def wait_for(self, pattern: str) -> re.Match[str]:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if found := re.search(pattern, line):
                return found
        raise AssertionError(f"ended without {pattern!r}: {''.join(self.log)}")

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        _, rest = self.process.communicate(timeout=30)
        self.log.append(rest)
        return self.process.returncode
