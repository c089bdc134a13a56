"""The child process that runs hooks, one call at a time, until its socket closes.

Frames are a length (4 bytes, little-endian) and that many bytes of MessagePack. Calls arrive on
file descriptor 0, answers are sent on 1. The first frame is the name of the class, answered by (OK,
names of its methods) or (FAILED, problem). All others are (method, arguments of each call); each
call is answered in order by (OK, result), (REFUSED, text) or (FAILED, traceback). `hooks.process`
is the other side.

An answer is sent before the next call begins, so that it is not lost if the process ends; those of
logits_processor, which depends on its arguments only and can be called again, are sent together.
The other side reads them when the bell rings.
"""

import importlib
import inspect
import os
import select
import socket
import threading
import time
import traceback
from collections.abc import Collection, Iterator
from typing import Any

import msgspec

from trtc.runtime.hooks.contract import (
    METHODS,
    NewOutput,
    Refused,
    Request,
    RequestInfo,
)
from trtc.runtime.hooks.progress import Progress

LENGTH_BYTES = 4
OK = "ok"
REFUSED = "refused"
FAILED = "failed"
_CALLS, _ANSWERS, _ERRORS = range(3)
_REPEATABLE = "logits_processor"
READ_BYTES = 1 << 18
_MOST_UNSENT_BYTES = 1 << 20
_RING_S = 1e-3
"""Seconds that an answer may wait for those of calls that arrived with its own."""


def main(progress: int, bell: int) -> None:
    """Answer calls until the socket closes.

    Args:
        progress: descriptor of a Progress's shared memory.
        bell: descriptor of the bell's socket.
    """
    incoming = os.dup(_CALLS)
    answers = Answers(socket.socket(fileno=os.dup(_ANSWERS)), socket.socket(fileno=bell))
    # Hooks may read from standard input and print to standard output.
    os.dup2(os.open(os.devnull, os.O_RDONLY), _CALLS)
    os.dup2(_ERRORS, _ANSWERS)
    threading.Thread(target=_end_with, args=(incoming,), daemon=True).start()
    frames = _frames(incoming)
    first = next((one for one in frames if one is not None), None)
    if first is None:
        return
    hooks, answer = _open(msgspec.msgpack.decode(first, type=str))
    answers.send(_framed(answer))
    answers.ring()
    if hooks is not None:
        _answer_all(hooks, frames, answers, Progress(progress))


class Answers:
    """Sends answers, and rings when the other side should read them: not for each, but when all
    calls are answered that have arrived, or after a while."""

    def __init__(self, answers: socket.socket, bell: socket.socket) -> None:
        self._answers = answers
        self._bell = bell
        self._since = 0.0

    def send(self, frames: bytes | bytearray) -> None:
        """Send frames, which are there for the other side even if this process ends next."""
        view = memoryview(frames)
        while view:
            try:
                view = view[self._answers.send(view, socket.MSG_DONTWAIT) :]
            except BlockingIOError:  # the other side has to read some first
                self.ring()
                select.select((), (self._answers,), ())
        if time.monotonic() > self._since + _RING_S:
            self.ring()

    def ring(self) -> None:
        self._bell.send(b"\0")
        self.begin()

    def begin(self) -> None:
        """Answers may wait from now on."""
        self._since = time.monotonic()


def _answer_all(
    hooks: Any, frames: Iterator[bytes | None], answers: Answers, progress: Progress
) -> None:
    decoders, unsent, number = _decoders(), bytearray(), 0
    for frame in frames:
        if frame is None:
            answers.ring()
            continue
        method, _ = msgspec.msgpack.decode(frame, type=tuple[str, msgspec.Raw])
        answers.begin()
        for arguments in decoders[method].decode(frame)[1]:
            number += 1
            progress.begin(number)
            unsent += _framed(_answer(hooks, method, arguments))
            if method != _REPEATABLE or len(unsent) >= _MOST_UNSENT_BYTES:
                answers.send(unsent)
                unsent.clear()
        if unsent:
            answers.send(unsent)
            unsent.clear()


def _decoders() -> "dict[str, msgspec.msgpack.Decoder[Any]]":
    """Method -> decoder of its calls."""
    decoder = msgspec.msgpack.Decoder
    return {
        "on_request": decoder(tuple[str, list[tuple[Request]]]),
        "on_prompt": decoder(tuple[str, list[tuple[RequestInfo, list[int]]]]),
        "logits_processor": decoder(tuple[str, list[tuple[RequestInfo, list[int]]]]),
        "on_output": decoder(tuple[str, list[tuple[RequestInfo, NewOutput]]]),
    }


def _open(name: str) -> tuple[Any, tuple[str, Any]]:
    """(an object of the class or None, the answer)."""
    try:
        module, _, path = name.partition(":")
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
        hooks = found()
    except Exception:  # noqa: BLE001 (an operator's code: whatever it raises is what is wrong)
        return None, (FAILED, traceback.format_exc())
    methods = [one for one in METHODS if callable(getattr(hooks, one, None))]
    if not methods:
        return None, (FAILED, f"it has none of {', '.join(METHODS)}")
    for one in methods:
        if inspect.iscoroutinefunction(getattr(hooks, one)):
            return None, (FAILED, f"{one} is a coroutine; hooks are functions")
    return hooks, (OK, methods)


def _answer(hooks: Any, method: str, arguments: tuple[Any, ...]) -> tuple[str, Any]:
    try:
        return OK, msgspec.Raw(_encoded(getattr(hooks, method)(*arguments)))
    except Refused as refusal:
        return REFUSED, str(refusal)
    except Exception:  # noqa: BLE001 (an operator's code fails its request alone)
        return FAILED, traceback.format_exc()


def _encoded(value: Any) -> bytes:
    return msgspec.msgpack.encode(value, enc_hook=_plain)


def _plain(value: Any) -> Any:
    """Convert arrays and other collections to lists."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Collection):
        return list(value)
    raise TypeError(f"a hook gave a {type(value).__name__}")


def _framed(answer: tuple[str, Any]) -> bytes:
    try:
        content = msgspec.msgpack.encode(answer)
    except UnicodeEncodeError:
        content = msgspec.msgpack.encode((answer[0], answer[1].encode(errors="replace").decode()))
    return len(content).to_bytes(LENGTH_BYTES, "little") + content


def _frames(descriptor: int) -> Iterator[bytes | None]:
    """Contents of frames; yields None if the next one has not arrived yet."""
    unread = bytearray()
    while chunk := os.read(descriptor, READ_BYTES):
        unread += chunk
        yield from take_frames(unread)
        yield None


def take_frames(unread: bytearray) -> list[bytes]:
    """Remove complete frames from the start of `unread`; returns their contents."""
    contents, begin = list[bytes](), 0
    while len(unread) >= begin + LENGTH_BYTES:
        content = begin + LENGTH_BYTES
        end = content + int.from_bytes(unread[begin:content], "little")
        if end > len(unread):
            break
        contents.append(bytes(unread[content:end]))
        begin = end
    del unread[:begin]
    return contents


def _end_with(channel: int) -> None:
    """Exit when the server has exited, even while a hook runs."""
    poll = select.poll()
    poll.register(channel, select.POLLRDHUP)
    poll.poll()
    os._exit(0)
