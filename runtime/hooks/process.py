"""One process that runs hooks, seen from the server."""

import asyncio
import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from typing import Any

import msgspec

from trtc.protos.errors import RequestError
from trtc.runtime.hooks.child import LENGTH_BYTES, OK, READ_BYTES, take_frames
from trtc.runtime.hooks.progress import Progress, Running, shared_memory

START_S = 60.0
"""Seconds for a new process to import and instantiate the class."""
MAX_ANSWER_BYTES = 64 << 20


class ProcessLost(Exception):
    """The process has exited, or has sent an invalid answer."""


def framed(content: bytes) -> bytes:
    return len(content).to_bytes(LENGTH_BYTES, "little") + content


class HookProcess:
    """Made by `start`; used in one asyncio loop."""

    def __init__(
        self,
        process: "subprocess.Popen[bytes]",
        reader: asyncio.StreamReader,
        writers: tuple[asyncio.StreamWriter, asyncio.StreamWriter],
        progress: Progress,
    ) -> None:
        """
        Args:
            writers: writer of calls, and writer of the socket of answers, which is not written to.
        """
        self._process = process
        self._reader = reader
        self._writers = writers
        self._progress = progress
        self._unread = bytearray()
        self.methods: frozenset[str] = frozenset()
        """Names of the hooks that the class has."""

    @classmethod
    async def start(cls, name: str) -> "HookProcess":
        """Start a process that instantiates the class `module:Class`.

        Raises:
            RequestError: the class cannot be used.
        """
        # Two sockets, so that after the process has exited, failing to send calls does not prevent
        # reading its earlier answers.
        calls, to_calls = socket.socketpair()
        answers, to_answers = socket.socketpair()
        descriptor = shared_memory()
        with to_calls, to_answers:
            process = _spawn(to_calls, to_answers, descriptor)
        progress = Progress(descriptor)
        with ExitStack() as undo:
            undo.callback(process.wait)
            undo.callback(process.kill)
            undo.callback(answers.close)
            undo.callback(calls.close)
            reader, unused = await asyncio.open_connection(sock=answers)
            undo.callback(unused.transport.abort)
            _, writer = await asyncio.open_connection(sock=calls)
            undo.pop_all()
        started = cls(process, reader, (writer, unused), progress)
        try:
            async with asyncio.timeout(START_S):
                await started._open(name)
        except TimeoutError as error:
            started.kill()
            raise _unusable(name, f"takes longer than {START_S:g} s to be made") from error
        except ProcessLost as error:
            started.kill()
            raise _unusable(name, "ended its process when it was made") from error
        except BaseException:
            started.kill()
            raise
        return started

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    @property
    def running(self) -> Running:
        """The call that it is running, or was running at its exit."""
        return self._progress.running()

    def send(self, frames: bytes) -> None:
        """Send one or several frames, without blocking."""
        self._writers[0].write(frames)

    async def receive(self) -> list[bytes]:
        """Wait for at least one frame; returns the contents of those that have arrived.

        Raises:
            ProcessLost: the process has exited.
        """
        while not (contents := take_frames(self._unread)):
            if len(self._unread) >= LENGTH_BYTES:
                size = int.from_bytes(self._unread[:LENGTH_BYTES], "little")
                if size > MAX_ANSWER_BYTES:
                    raise ProcessLost(f"gave {size} bytes")
            try:
                chunk = await self._reader.read(READ_BYTES)
            except OSError as error:
                raise ProcessLost("ended its process") from error
            if not chunk:
                raise ProcessLost("ended its process")
            self._unread += chunk
        return contents

    def kill(self) -> None:
        """End it at once. Idempotent."""
        self._process.kill()
        for writer in self._writers:
            writer.transport.abort()
        asyncio.get_running_loop().run_in_executor(None, self._process.wait)

    async def _open(self, name: str) -> None:
        self.send(framed(msgspec.msgpack.encode(name)))
        (first,) = await self.receive()
        status, found = msgspec.msgpack.decode(first, type=tuple[str, Any])
        if status != OK:
            raise _unusable(name, f"cannot be used: {str(found).strip()}")
        self.methods = frozenset(found)


def _spawn(
    calls: socket.socket, answers: socket.socket, progress: int
) -> "subprocess.Popen[bytes]":
    paths = [os.path.abspath(one) for one in sys.path]  # noqa: PTH100 (links stay as they are)
    code = f"import sys; sys.path[:] = {paths!r}; from trtc.runtime.hooks.child import main; "
    code += f"main({progress})"
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=calls.fileno(),
        stdout=answers.fileno(),
        pass_fds=(progress,),
        start_new_session=True,  # Ctrl-C is for the server, which drains
    )


def _unusable(name: str, problem: str) -> RequestError:
    return RequestError(
        f"{name} {problem}",
        field="--hooks",
        remedy="Give module:Class, of a module on PYTHONPATH (docs/hooks.md)",
    )
