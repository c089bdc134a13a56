"""One process that runs hooks, seen from the server."""

import asyncio
import os
import socket
import subprocess
import sys
from contextlib import ExitStack, suppress
from typing import Any

import msgspec

from trtc.protos.errors import RequestError
from trtc.runtime.hooks.child import LENGTH_BYTES, OK, READ_BYTES, take_frames
from trtc.runtime.hooks.progress import Progress, Running, shared_memory
from trtc.runtime.text.surrogates import without_surrogates

START_S = 60.0
"""Seconds for a new process to import and instantiate the class."""
MAX_ANSWER_BYTES = 64 << 20


class ProcessLost(Exception):
    """The process has exited, or has sent an invalid answer."""


def framed(content: bytes) -> bytes:
    return len(content).to_bytes(LENGTH_BYTES, "little") + content


def framed_calls(method: str, calls: list[tuple[Any, ...]]) -> bytes:
    """The message with calls of a method, by their arguments."""
    try:
        content = msgspec.msgpack.encode((method, calls))
    except UnicodeEncodeError:
        plain = msgspec.to_builtins((method, calls), str_keys=False)
        content = msgspec.msgpack.encode(without_surrogates(plain))
    return framed(content)


class HookProcess:
    """Made by `start`; used in one asyncio loop."""

    def __init__(
        self,
        process: "subprocess.Popen[bytes]",
        bell: asyncio.StreamReader,
        answers: socket.socket,
        writers: tuple[asyncio.StreamWriter, asyncio.StreamWriter],
        progress: Progress,
    ) -> None:
        """
        Args:
            bell: has bytes when `answers` are to be read, and ends with the process.
            writers: writer of calls, and writer of the bell, which is not written to.
        """
        self._process = process
        self._bell = bell
        self._answers = answers
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
        bell, to_bell = socket.socketpair()
        answers.setblocking(False)
        descriptor = shared_memory()
        with to_calls, to_answers, to_bell:
            process = _spawn(to_calls, to_answers, to_bell, descriptor)
        progress = Progress(descriptor)
        with ExitStack() as undo:
            undo.callback(process.wait)
            undo.callback(process.kill)
            undo.callback(answers.close)
            undo.callback(calls.close)
            undo.callback(bell.close)
            reader, unused = await asyncio.open_connection(sock=bell)
            undo.callback(unused.transport.abort)
            _, writer = await asyncio.open_connection(sock=calls)
            undo.pop_all()
        started = cls(process, reader, answers, (writer, unused), progress)
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
            has_ended = not await self._rung()
            if not self._read_sent() and has_ended:
                raise ProcessLost("ended its process")
        return contents

    async def _rung(self) -> bool:
        """Wait for the bell; False: the process has ended."""
        try:
            return bool(await self._bell.read(READ_BYTES))
        except OSError:
            return False

    def _read_sent(self) -> bool:
        """Read what has been sent; returns whether there was anything."""
        num_before = len(self._unread)
        with suppress(OSError):  # no more yet, or never
            while chunk := self._answers.recv(READ_BYTES):
                self._unread += chunk
        return len(self._unread) > num_before

    def kill(self) -> None:
        """End it at once. Idempotent."""
        self._process.kill()
        for writer in self._writers:
            writer.transport.abort()
        self._answers.close()
        asyncio.get_running_loop().run_in_executor(None, self._process.wait)

    async def _open(self, name: str) -> None:
        self.send(framed(msgspec.msgpack.encode(name)))
        (first,) = await self.receive()
        status, found = msgspec.msgpack.decode(first, type=tuple[str, Any])
        if status != OK:
            raise _unusable(name, f"cannot be used: {str(found).strip()}")
        self.methods = frozenset(found)


def _spawn(
    calls: socket.socket, answers: socket.socket, bell: socket.socket, progress: int
) -> "subprocess.Popen[bytes]":
    paths = [os.path.abspath(one) for one in sys.path]  # noqa: PTH100 (links stay as they are)
    code = f"import sys; sys.path[:] = {paths!r}; from trtc.runtime.hooks.child import main; "
    code += f"main({progress}, {bell.fileno()})"
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=calls.fileno(),
        stdout=answers.fileno(),
        pass_fds=(progress, bell.fileno()),
        start_new_session=True,  # Ctrl-C is for the server, which drains
    )


def _unusable(name: str, problem: str) -> RequestError:
    return RequestError(
        f"{name} {problem}",
        field="--hooks",
        remedy="Give module:Class, of a module on PYTHONPATH (docs/hooks.md)",
    )
