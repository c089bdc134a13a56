"""Trial compilation of a grammar in a process with limits of time, memory and stack.

Compiling an untrusted grammar may take unlimited time and memory, or overflow the stack and crash
the process. So each grammar is first compiled in a separate process, and only if that succeeds in
the server's.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from trtc.protos.errors import EnvironmentFault, InvalidRequestError, ServeError, UnavailableError
from trtc.runtime.host.limited_pool import LimitedPool, SetUpEnded
from trtc.runtime.host.limited_process import OutOfMemory, OutOfTime, ProcessEnded, TimedOut
from trtc.runtime.requests.grammar import Grammar

_MODULE = "trtc.runtime.grammar.trial_child"
_PACKAGES = ("llguidance", "msgspec")


@dataclass(frozen=True)
class TrialLimits:
    """Limits of one grammar. Most take milliseconds and a few megabytes."""

    cpu_seconds: float = 2.0
    """What refuses a grammar: it is the same on a busy machine."""
    wall_seconds: float = 60.0
    """Until the machine is too busy to say."""
    memory_bytes: int = 512 << 20
    recycle_bytes: int = 256 << 20
    """Resident memory beyond which a process is replaced."""
    processes: int = 2


class GrammarTrials:
    """Compiles grammars for trial. Thread-safe. The first one starts the first process."""

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
        self._pool = LimitedPool(
            _MODULE,
            _PACKAGES,
            {
                "limits": {
                    "cpu_seconds": self._limits.cpu_seconds,
                    "memory_bytes": self._limits.memory_bytes,
                    "recycle_bytes": self._limits.recycle_bytes,
                },
                "token_ids": token_ids or {},
                "end_token_ids": tuple(end_token_ids),
            },
            self._limits.processes,
        )

    def run(self, grammar: Grammar) -> str:
        """The grammar in llguidance's format, after a trial compilation.

        Raises:
            InvalidRequestError: it is invalid, not supported by llguidance, or exceeds a limit.
            UnavailableError: closed; or the machine is too busy.
            EnvironmentFault: no process can be started.
        """
        try:
            asked = {"kind": grammar.kind, "text": grammar.text}
            answer = self._pool.call(asked, self._limits.wall_seconds)
        except ProcessEnded as error:
            raise self._failure(grammar, error) from error
        except SetUpEnded as error:
            raise EnvironmentFault(
                f"the process that tries grammars does not start ({error.__cause__})",
                remedy="Run pip install llguidance",
            ) from error
        if answer["status"] != "ok":
            raise refused(grammar, f"cannot be compiled: {answer['problem']}")
        return str(answer["grammar"])

    def close(self) -> None:
        """End all processes at once. Idempotent."""
        self._pool.close()

    def _failure(self, grammar: Grammar, error: ProcessEnded) -> ServeError:
        if isinstance(error, TimedOut):
            return UnavailableError(
                f"was not compiled within {self._limits.wall_seconds:g} s, in which it had less "
                f"than {self._limits.cpu_seconds:g} s of CPU time",
                field=grammar.field,
                remedy="Ask again; this machine is too busy",
            )
        if isinstance(error, OutOfTime):
            return refused(
                grammar, f"takes more than {self._limits.cpu_seconds:g} s of CPU time to compile"
            )
        if isinstance(error, OutOfMemory):
            mebibytes = self._limits.memory_bytes >> 20
            return refused(grammar, f"takes more than {mebibytes} MiB to compile")
        return refused(grammar, f"is nested too deeply, or ends its compiler ({error})")


def refused(grammar: Grammar, problem: str) -> InvalidRequestError:
    """The error of a grammar that cannot be enforced."""
    return InvalidRequestError(
        problem, field=grammar.field, remedy="docs/structured-output.md lists what can be held"
    )
