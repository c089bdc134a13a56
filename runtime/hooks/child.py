"""The child process that runs hooks, one call at a time, until its socket closes.

Frames are a length (4 bytes, little-endian) and that many bytes of MessagePack. Calls arrive on
file descriptor 0, answers are sent on 1. The first frame is the name of the class, answered by (OK,
names of its methods) or (FAILED, problem). All others are (method, arguments), answered in order by
(OK, result), (REFUSED, text) or (FAILED, traceback). `hooks.process` is the other side.

Calls that arrive together are answered together if they can be repeated after a crash of the
process: those of logits_processor, which depends on its arguments only.
"""

import importlib
import inspect
import os
import select
import socket
import threading
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


def main(progress: int) -> None:
    """Answer calls until the socket closes.

    Args:
        progress: descriptor of a Progress's shared memory.
    """
    incoming, answers = os.dup(_CALLS), socket.socket(fileno=os.dup(_ANSWERS))
    # Hooks may read from standard input and print to standard output.
    os.dup2(os.open(os.devnull, os.O_RDONLY), _CALLS)
    os.dup2(_ERRORS, _ANSWERS)
    threading.Thread(target=_end_with, args=(incoming,), daemon=True).start()
    frames = _frames(incoming)
    first = next((one for one in frames if one is not None), None)
    if first is None:
        return
    hooks, answer = _open(msgspec.msgpack.decode(first, type=str))
    answers.sendall(_framed(answer))
    if hooks is not None:
        _answer_all(hooks, frames, answers, Progress(progress))


def _answer_all(
    hooks: Any, frames: Iterator[bytes | None], answers: socket.socket, progress: Progress
) -> None:
    calls, unsent, number = _calls(), bytearray(), 0
    for frame in frames:
        if frame is not None:
            number += 1
            progress.begin(number)
            method, _ = msgspec.msgpack.decode(frame, type=tuple[str, msgspec.Raw])
            unsent += _framed(_answer(hooks, calls, method, frame))
            if method == _REPEATABLE and len(unsent) < _MOST_UNSENT_BYTES:
                continue
        if unsent:
            answers.sendall(unsent)
            unsent.clear()


def _calls() -> "dict[str, msgspec.msgpack.Decoder[Any]]":
    """Method -> decoder of its calls."""
    decoder = msgspec.msgpack.Decoder
    return {
        "on_request": decoder(tuple[str, tuple[Request]]),
        "on_prompt": decoder(tuple[str, tuple[RequestInfo, list[int]]]),
        "logits_processor": decoder(tuple[str, tuple[RequestInfo, list[int]]]),
        "on_output": decoder(tuple[str, tuple[RequestInfo, NewOutput]]),
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


def _answer(
    hooks: Any, calls: "dict[str, msgspec.msgpack.Decoder[Any]]", method: str, frame: bytes
) -> tuple[str, Any]:
    _, arguments = calls[method].decode(frame)
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
