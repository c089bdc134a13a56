"""The error tree: what went wrong, where, and what to do about it.

TrtcError
├── UserError            the input is wrong; the user can correct it         exit 2
│   ├── RequestError       build or command-line options
│   ├── CheckpointError    the model directory
│   ├── UnsupportedError   a family, feature, scheme or target that is not supported
│   ├── CalibrationError   the calibration text
│   ├── AccuracyError      the quantised model missed its budget               exit 3
│   └── OutputError        the output directory
├── EngineError          an engine directory that may not be loaded          exit 4
│   ├── EngineCorruptError
│   ├── EngineIncompatibleError
│   └── EngineUntrustedError   not signed by a trusted key, or not the engine that was asked for
├── EnvironmentFault     this machine lacks something                        exit 5
├── ServeError           one request's error                                 exit 6
│   ├── InvalidRequestError    its fields
│   │   └── ContextLengthError   prompt and completion do not fit
│   ├── UnauthenticatedError   its sender is unknown: no key or certificate, or an unknown one
│   ├── ForbiddenError         its sender has not the permission
│   ├── QueueFullError         a limit on requests, streams or tokens is reached
│   ├── DeadlineError          its deadline has passed
│   ├── CancelledError         by its client
│   ├── NoTokenizerError       text for an engine that takes token ids only
│   ├── UnknownModelError
│   ├── UnknownRequestError
│   ├── UnavailableError       draining, or the engine loop has died
│   └── HookError              an operator's hook failed, or took too long
└── InvariantError       a bug in trtc                                       exit 70

Protocols have codes of their own for these: each maps the tree by a table (`by_class`).
"""

from collections.abc import Mapping
from typing import ClassVar, TypeVar

T = TypeVar("T")


class TrtcError(Exception):
    """The base of all errors that trtc raises on purpose.

    Args:
        problem: what is wrong, in one sentence without the field's name.
        field: the option, file, tensor or request field that is wrong ("" when there is none).
        remedy: what the reader can do now ("" when nothing can be done).
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, problem: str, *, field: str = "", remedy: str = "") -> None:
        self.problem = problem
        self.field = field
        self.remedy = remedy
        super().__init__(str(self))

    def __str__(self) -> str:
        head = f"{self.field}: {self.problem}" if self.field else self.problem
        return f"{head}. {self.remedy}" if self.remedy else head


class UserError(TrtcError):
    exit_code = 2


class RequestError(UserError):
    pass


class CheckpointError(UserError):
    pass


class UnsupportedError(UserError):
    pass


class CalibrationError(UserError):
    pass


class AccuracyError(UserError):
    exit_code = 3


class OutputError(UserError):
    pass


class EngineError(TrtcError):
    exit_code = 4


class EngineCorruptError(EngineError):
    pass


class EngineIncompatibleError(EngineError):
    pass


class EngineUntrustedError(EngineError):
    pass


class EnvironmentFault(TrtcError):
    exit_code = 5


class ServeError(TrtcError):
    exit_code = 6


class InvalidRequestError(ServeError):
    pass


class ContextLengthError(InvalidRequestError):
    pass


class UnauthenticatedError(ServeError):
    pass


class ForbiddenError(ServeError):
    pass


class QueueFullError(ServeError):
    """
    Args:
        limit: the limit that was reached, for metrics; not sent to clients.
        retry_after_s: seconds after which a retry may succeed; None: unknown.
    """

    def __init__(
        self,
        problem: str,
        *,
        field: str = "",
        remedy: str = "",
        limit: str = "",
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(problem, field=field, remedy=remedy)
        self.limit = limit
        self.retry_after_s = retry_after_s


class DeadlineError(ServeError):
    pass


class CancelledError(ServeError):
    pass


class NoTokenizerError(ServeError):
    pass


class UnknownModelError(ServeError):
    pass


class UnknownRequestError(ServeError):
    pass


class UnavailableError(ServeError):
    pass


class HookError(ServeError):
    pass


class InvariantError(TrtcError):
    exit_code = 70


def by_class(table: Mapping[type[TrtcError], T], error: TrtcError, otherwise: T) -> T:
    """The table's entry for the error's class, or for the nearest class that it derives from."""
    for kind in type(error).__mro__:
        if kind in table:
            return table[kind]
    return otherwise
