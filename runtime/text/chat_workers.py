"""The limited processes that render one chat template, and what their answers mean.

The first chat starts the first process; the template is compiled once in each. A process that goes
over a limit is replaced when the next one is wanted.
"""

import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trtc.protos.errors import (
    InvalidRequestError,
    NoTokenizerError,
    QueueFullError,
    UnavailableError,
)
from trtc.runtime.host.limited_process import (
    START_S,
    LimitedProcess,
    OutOfMemory,
    OutOfTime,
    ProcessEnded,
)

MAX_TEMPLATE_CHARACTERS = 1 << 18
_MODULE = "trtc.runtime.text.chat_sandbox"
_PACKAGES = ("jinja2", "markupsafe")


@dataclass(frozen=True)
class RenderLimits:
    """Of one rendering. A model's own template takes a millisecond and a megabyte."""

    cpu_seconds: float = 2.0
    wall_seconds: float = 10.0
    """More than CPU time, as other processes may keep a machine busy."""
    memory_bytes: int = 512 << 20
    characters: int = 1 << 23
    recycle_bytes: int = 128 << 20
    """Resident memory beyond which a process is replaced although it has done nothing wrong."""
    processes: int = 2
    wait_seconds: float = 10.0
    """For a process to become free."""


class ChatWorkers:
    """Renders from any thread. Close it to end its processes, which end with this one at last."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], limits: RenderLimits | None = None
    ) -> None:
        self._limits = limits or RenderLimits()
        self._source = source
        self._special_tokens = dict(special_tokens)
        self._changed = threading.Condition()
        self._idle: list[LimitedProcess] = []
        self._busy = 0
        self._invalid = ""
        """What is wrong with the template, once that is known: no process will compile it."""
        if len(source) > MAX_TEMPLATE_CHARACTERS:
            self._invalid = f"has {len(source)} characters"
        self._closed = False
        self._processes: set[LimitedProcess] = set()
        weakref.finalize(self, _close_all, self._processes)

    @property
    def is_invalid(self) -> bool:
        """Whether the template is known to be invalid: somebody has tried to compile it."""
        return bool(self._invalid)

    def compile(self) -> None:
        """Find out whether the template is valid.

        Raises:
            NoTokenizerError: it is not; or compiling it goes over a limit.
            EnvironmentFault: no process can be started.
        """
        self._release(self._acquire(), is_usable=True)

    def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """The template's text.

        Args:
            variables: what it may read beside the messages and the special tokens.

        Raises:
            InvalidRequestError: the template refuses the messages, or goes over a limit.
            NoTokenizerError: the template is not valid.
            QueueFullError: all processes were busy for too long.
            UnavailableError: closed.
            EnvironmentFault: no process can be started.
        """
        process = self._acquire()
        is_usable = False
        try:
            answer = process.call(
                {"messages": [dict(one) for one in messages], "variables": dict(variables)},
                self._limits.wall_seconds,
            )
            is_usable = not answer["last"]
        except ProcessEnded as error:
            raise self._failure(error) from error
        finally:
            self._release(process, is_usable)
        if answer["status"] == "refused":
            raise _refused(f"refuses them ({answer['problem']})")
        if answer["status"] == "size":
            raise _refused(f"gives more than {self._limits.characters} characters for them")
        return str(answer["text"])

    def close(self) -> None:
        """End all processes at once; renderings end with UnavailableError. Idempotent."""
        with self._changed:
            self._closed = True
            while self._idle:
                self._discard(self._idle.pop())
            for process in self._processes:
                process.kill()  # whoever waits for it closes it
            self._changed.notify_all()

    def _acquire(self) -> LimitedProcess:
        """A process that has compiled the template, for this thread alone."""
        deadline = time.monotonic() + self._limits.wait_seconds
        with self._changed:
            while True:
                self._check_open()
                if self._busy < self._limits.processes:
                    break
                if not self._changed.wait(deadline - time.monotonic()):
                    raise QueueFullError(
                        f"all {self._busy} processes that render chat templates were busy for "
                        f"{self._limits.wait_seconds:g} seconds",
                        field="chat",
                        remedy="Try again later",
                    )
            self._busy += 1
            while self._idle:
                process = self._idle.pop()
                if process.is_alive:
                    return process
                self._discard(process)
        try:
            return self._start()
        except BaseException:
            with self._changed:
                self._busy -= 1
                self._changed.notify()
            raise

    def _release(self, process: LimitedProcess, is_usable: bool) -> None:
        with self._changed:
            self._busy -= 1
            if is_usable and not self._closed:
                self._idle.append(process)
            else:
                self._discard(process)
            self._changed.notify()

    def _discard(self, process: LimitedProcess) -> None:
        process.close()
        self._processes.discard(process)

    def _check_open(self) -> None:
        if self._closed:
            raise UnavailableError("the engine is closed")
        if self._invalid:
            raise _unusable(self._invalid)

    def _start(self) -> LimitedProcess:
        process = LimitedProcess(_MODULE, _PACKAGES)
        with self._changed:
            self._processes.add(process)
        try:
            answer = process.call(self._set_up(), START_S)
        except ProcessEnded as error:
            with self._changed:
                self._discard(process)
                if self._closed:
                    raise UnavailableError("the engine is closed") from error
            raise _unusable(f"{_how_it_ended(error, self._limits)} to compile") from error
        if answer["status"] != "ok":
            with self._changed:
                self._discard(process)
            self._invalid = f"is not valid Jinja ({answer['problem']})"
            raise _unusable(self._invalid)
        return process

    def _set_up(self) -> dict[str, Any]:
        limits = self._limits
        return {
            "source": self._source,
            "special_tokens": self._special_tokens,
            "max_characters": limits.characters,
            "limits": {
                "cpu_seconds": limits.cpu_seconds,
                "memory_bytes": limits.memory_bytes,
                "recycle_bytes": limits.recycle_bytes,
            },
        }

    def _failure(self, error: ProcessEnded) -> InvalidRequestError | UnavailableError:
        if self._closed:
            return UnavailableError("the engine is closed")
        return _refused(f"{_how_it_ended(error, self._limits)} with them")


def _how_it_ended(error: ProcessEnded, limits: RenderLimits) -> str:
    if isinstance(error, OutOfTime):
        return f"takes more than {limits.cpu_seconds:g} seconds"
    if isinstance(error, OutOfMemory):
        return f"takes more than {limits.memory_bytes >> 20} MiB of memory"
    return f"crashes its process ({error})"


def _refused(problem: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"the model's chat template {problem}",
        field="messages",
        remedy="Give roles and contents that the template knows",
    )


def _unusable(problem: str) -> NoTokenizerError:
    return NoTokenizerError(
        f"the chat template {problem}", field="chat", remedy="Give a text prompt"
    )


def _close_all(processes: set[LimitedProcess]) -> None:
    """For somebody who did not close what nobody can use any more."""
    for process in processes:
        process.close()
