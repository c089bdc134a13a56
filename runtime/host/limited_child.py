"""The child side of a limited process: answers requests until its pipe closes or a limit ends it.

Frames in both directions are a length (4 bytes, little-endian) and that many bytes of JSON, over
file descriptor 0. The first request is the set-up, later ones are the work. Standard library only;
`limited_process` is the other side.
"""

import json
import os
import resource
import signal
from collections.abc import Callable, Mapping
from typing import Any

Message = Mapping[str, Any]
Work = Callable[[Message], Message]

LENGTH_BYTES = 4
OUT_OF_MEMORY_STATUS = 3
"""Exit status of a process that could not answer because it ran out of memory."""
_PIPE = 0
_MAX_READ = 1 << 20


def serve(set_up: Callable[[Message], tuple[Message, Work]]) -> None:
    """Answer requests until the pipe closes.

    `"limits"` of the first request are `cpu_seconds` of each request, after which the kernel ends
    the process (SIGPROF), `memory_bytes` of address space in addition to the current use, and
    `recycle_bytes`: a process with this much peak resident memory exits after its answer, so that
    the memory of a large request is freed. `"last": true` in an answer announces that. The answer
    to a request that runs out of memory is {"status": "memory"}.

    Args:
        set_up: handles the first request; returns its answer and the handler of later requests.
    """
    first = _receive()
    if first is None:
        return
    content: bytes | None = first
    limits = json.loads(first)["limits"]
    status = os.open("/proc/self/status", os.O_RDONLY)
    _limit(limits["memory_bytes"])
    work: Work | None = None
    while content is not None:
        _limit_cpu(limits["cpu_seconds"])
        try:
            if work is None:
                answer, work = set_up(json.loads(content))
                is_last = False
            else:
                answer = work(json.loads(content))
                is_last = _peak_bytes(status) > limits["recycle_bytes"]
            frame = _framed({**answer, "last": is_last})
        except MemoryError:
            content = answer = None
            is_last = True
            frame = _framed({"status": "memory", "last": True})
        _limit_cpu(0)
        _send(frame)
        content = None if is_last else _receive()


def run(main: Callable[[], None]) -> None:
    """Run `main` and exit, without tracebacks."""
    try:
        main()
    except (BrokenPipeError, ConnectionError, KeyboardInterrupt):
        os._exit(0)
    except MemoryError:
        os._exit(OUT_OF_MEMORY_STATUS)
    os._exit(0)


def _limit(memory_bytes: int) -> None:
    """Limit memory, and forbid opening files, starting processes and core dumps from now on."""
    with open("/proc/self/statm", "rb") as file:  # noqa: PTH123 (pathlib takes 5 ms to import)
        in_use = int(file.read().split()[0]) * resource.getpagesize()
    for kind, value in (
        (resource.RLIMIT_AS, in_use + memory_bytes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, 0),
    ):
        resource.setrlimit(kind, (value, value))


def _peak_bytes(status: int) -> int:
    """Largest resident memory since this program began, from an open /proc/self/status.

    Not `ru_maxrss`, which across `exec` keeps the peak of the process that forked this one.
    """
    (line,) = (line for line in os.pread(status, 1 << 14, 0).splitlines() if line[:6] == b"VmHWM:")
    return int(line.split()[1]) << 10


def _limit_cpu(seconds: float) -> None:
    """Let SIGPROF end the process after this much CPU time; 0: never."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def _receive() -> bytes | None:
    head = _read(LENGTH_BYTES)
    return _read(int.from_bytes(head, "little")) if head else None


def _read(size: int) -> bytes | None:
    parts, left = [], size
    while left:
        part = os.read(_PIPE, min(left, _MAX_READ))
        if not part:
            return None
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def _framed(answer: Message) -> bytes:
    # Templates can produce lone surrogates, which strict UTF-8 refuses.
    content = json.dumps(answer, ensure_ascii=False).encode("utf-8", "surrogatepass")
    return len(content).to_bytes(LENGTH_BYTES, "little") + content


def _send(frame: bytes) -> None:
    left = memoryview(frame)
    while left:
        left = left[os.write(_PIPE, left) :]
