"""The limited processes that render one chat template.

The first chat starts the first process; each process compiles the template once. A process that
exceeds a limit is replaced at the next use.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from trtc.protos.errors import (
    InvalidRequestError,
    NoTokenizerError,
    QueueFullError,
)
from trtc.runtime.host.limited_pool import LimitedPool, PoolBusy, SetUpEnded, SetUpRefused
from trtc.runtime.host.limited_process import OutOfMemory, OutOfTime, ProcessEnded

MAX_TEMPLATE_CHARACTERS = 1 << 18
_MODULE = "trtc.runtime.text.chat_sandbox"
_PACKAGES = ("jinja2", "markupsafe")

T = TypeVar("T")


@dataclass(frozen=True)
class RenderLimits:
    """Limits of one rendering. Typical templates take a millisecond and a megabyte."""

    cpu_seconds: float = 2.0
    wall_seconds: float = 10.0
    """More than the CPU time, because other processes may use the CPUs."""
    memory_bytes: int = 512 << 20
    characters: int = 1 << 23
    recycle_bytes: int = 128 << 20
    """Resident memory beyond which a process is replaced after its answer."""
    processes: int = 2
    wait_seconds: float = 10.0
    """Seconds to wait for a free process."""


class ChatWorkers:
    """Renders chats. Thread-safe. Close it to end its processes, which also end with this one."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], limits: RenderLimits | None = None
    ) -> None:
        self._limits = limits or RenderLimits()
        self._invalid = ""
        """Why the template is invalid, once that is known; then no process compiles it again."""
        if len(source) > MAX_TEMPLATE_CHARACTERS:
            self._invalid = f"has {len(source)} characters"
        self._pool = LimitedPool(
            _MODULE,
            _PACKAGES,
            {
                "source": source,
                "special_tokens": dict(special_tokens),
                "max_characters": self._limits.characters,
                "limits": {
                    "cpu_seconds": self._limits.cpu_seconds,
                    "memory_bytes": self._limits.memory_bytes,
                    "recycle_bytes": self._limits.recycle_bytes,
                },
            },
            self._limits.processes,
        )

    @property
    def is_invalid(self) -> bool:
        """Whether the template is known to be invalid."""
        return bool(self._invalid)

    def compile(self) -> None:
        """Compile the template.

        Raises:
            NoTokenizerError: the template is invalid, or compiling it exceeds a limit.
            EnvironmentFault: no process can be started.
        """
        self._refer(lambda: self._pool.start(self._limits.wait_seconds))

    def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """Render messages.

        Args:
            variables: template variables besides the messages and the special tokens.

        Raises:
            InvalidRequestError: the template refuses the messages, or exceeds a limit.
            NoTokenizerError: the template is not valid.
            QueueFullError: all processes were busy for too long.
            UnavailableError: closed.
            EnvironmentFault: no process can be started.
        """
        asked = {"messages": [dict(one) for one in messages], "variables": dict(variables)}
        limits = self._limits
        answer = self._refer(
            lambda: self._pool.call(asked, limits.wall_seconds, limits.wait_seconds)
        )
        if answer["status"] == "refused":
            raise _refused(f"refuses them ({answer['problem']})")
        if answer["status"] == "size":
            raise _refused(f"gives more than {self._limits.characters} characters for them")
        return str(answer["text"])

    def close(self) -> None:
        """End all processes at once; renderings end with UnavailableError. Idempotent."""
        self._pool.close()

    def _refer(self, use: Callable[[], T]) -> T:
        """Call the pool; translates its errors to those of the request."""
        if self._invalid:
            raise _unusable(self._invalid)
        try:
            return use()
        except ProcessEnded as error:
            raise _refused(f"{_how_it_ended(error, self._limits)} with them") from error
        except SetUpEnded as error:
            raise _unusable(f"{_how_it_ended(error.__cause__, self._limits)} to compile") from error
        except SetUpRefused as error:
            self._invalid = f"is not valid Jinja ({error})"
            raise _unusable(self._invalid) from error
        except PoolBusy as error:
            raise QueueFullError(
                f"all {self._limits.processes} processes that render chat templates were busy for "
                f"{self._limits.wait_seconds:g} seconds",
                field="chat",
                remedy="Try again later",
            ) from error


def _how_it_ended(error: BaseException | None, limits: RenderLimits) -> str:
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
