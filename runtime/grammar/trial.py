"""Whether a grammar can be compiled, tried in a process with limits of time, memory and stack.

A compiler of strangers' grammars may take any time and memory, or overflow its stack and end its
process. So each is compiled in a process of its own first; what comes out well there is then
compiled in the server's.
"""

import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from trtc.protos.errors import EnvironmentFault, InvalidRequestError, UnavailableError
from trtc.runtime.host.limited_process import (
    START_S,
    LimitedProcess,
    OutOfMemory,
    OutOfTime,
    ProcessEnded,
)
from trtc.runtime.requests.grammar import Grammar

_MODULE = "trtc.runtime.grammar.trial_child"
_PACKAGES = ("llguidance", "msgspec")


@dataclass(frozen=True)
class TrialLimits:
    """Of one grammar. Most take milliseconds, and a few megabytes."""

    cpu_seconds: float = 2.0
    wall_seconds: float = 10.0
    memory_bytes: int = 512 << 20
    recycle_bytes: int = 256 << 20
    """Resident memory beyond which a process is replaced."""
    processes: int = 2


class GrammarTrials:
    """Tries grammars, from any thread. The first one starts the first process."""

    def __init__(
        self,
        limits: TrialLimits | None = None,
        token_ids: Mapping[str, int] | None = None,
        end_token_ids: Collection[int] = (),
    ) -> None:
        """
        Args:
            token_ids: of added tokens by their texts, by which structural tags name them.
            end_token_ids: end-of-sequence tokens.
        """
        self._limits = limits or TrialLimits()
        self._token_ids = {"token_ids": token_ids or {}, "end_token_ids": tuple(end_token_ids)}
        self._slots = threading.BoundedSemaphore(self._limits.processes)
        self._lock = threading.Lock()
        self._idle: list[LimitedProcess] = []
        self._busy: set[LimitedProcess] = set()
        self._closed = False

    def run(self, grammar: Grammar) -> str:
        """The grammar in llguidance's own words.

        Raises:
            InvalidRequestError: it is not valid, has something that llguidance does not hold, or
                goes over a limit.
            UnavailableError: closed.
            EnvironmentFault: no process can be started.
        """
        with self._slots:
            process = self._take()
            is_usable = False
            try:
                asked = {"kind": grammar.kind, "text": grammar.text}
                answer = process.call(asked, self._limits.wall_seconds)
                is_usable = not answer["last"]
            except ProcessEnded as error:
                raise self._failure(grammar, error) from error
            finally:
                self._give_back(process, is_usable=is_usable)
        if answer["status"] != "ok":
            raise refused(grammar, f"cannot be compiled: {answer['problem']}")
        return str(answer["grammar"])

    def close(self) -> None:
        """End all processes at once. Idempotent."""
        with self._lock:
            self._closed = True
            while self._idle:
                self._idle.pop().close()
            for process in self._busy:
                process.kill()  # whoever waits for it closes it

    def _take(self) -> LimitedProcess:
        while True:
            with self._lock:
                if self._closed:
                    raise UnavailableError("the engine is closed")
                process = self._idle.pop() if self._idle else None
                if process is not None and process.is_alive:
                    self._busy.add(process)
                    return process
            if process is None:
                return self._started()
            process.close()

    def _started(self) -> LimitedProcess:
        process = LimitedProcess(_MODULE, _PACKAGES)
        with self._lock:
            self._busy.add(process)
        limits = {
            "cpu_seconds": self._limits.cpu_seconds,
            "memory_bytes": self._limits.memory_bytes,
            "recycle_bytes": self._limits.recycle_bytes,
        }
        try:
            process.call({"limits": limits, **self._token_ids}, START_S)
        except ProcessEnded as error:
            self._give_back(process, is_usable=False)
            if self._closed:
                raise UnavailableError("the engine is closed") from error
            raise EnvironmentFault(
                f"the process that tries grammars does not start ({error})",
                remedy="Run pip install llguidance",
            ) from error
        return process

    def _give_back(self, process: LimitedProcess, *, is_usable: bool) -> None:
        with self._lock:
            self._busy.discard(process)
            if is_usable and not self._closed:
                self._idle.append(process)
                return
        process.close()

    def _failure(
        self, grammar: Grammar, error: ProcessEnded
    ) -> InvalidRequestError | UnavailableError:
        if self._closed:
            return UnavailableError("the engine is closed")
        if isinstance(error, OutOfTime):
            return refused(grammar, f"takes more than {self._limits.cpu_seconds:g} s to compile")
        if isinstance(error, OutOfMemory):
            mebibytes = self._limits.memory_bytes >> 20
            return refused(grammar, f"takes more than {mebibytes} MiB to compile")
        return refused(grammar, f"is nested too deeply, or ends its compiler ({error})")


def refused(grammar: Grammar, problem: str) -> InvalidRequestError:
    """The error of a grammar that cannot be kept to."""
    return InvalidRequestError(
        problem, field=grammar.field, remedy="docs/structured-output.md lists what can be held"
    )
