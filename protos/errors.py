"""The error tree: what went wrong, where, and what to do about it.

TrtcError
├── UserError            the input is wrong; the user can mend it            exit 2
│   ├── RequestError       build or command-line options
│   ├── CheckpointError    the model directory
│   ├── UnsupportedError   a family, feature, scheme or target that trtc does not know
│   ├── CalibrationError   the calibration text
│   ├── AccuracyError      the quantised model missed its budget               exit 3
│   └── OutputError        the output directory
├── EngineError          an engine directory that may not be loaded          exit 4
│   ├── EngineCorruptError
│   └── EngineIncompatibleError
├── EnvironmentFault     this machine lacks something                        exit 5
├── ServeError           one request's error, with its gRPC status           exit 6
│   ├── InvalidRequestError        INVALID_ARGUMENT
│   ├── QueueFullError             RESOURCE_EXHAUSTED
│   ├── DeadlineError              DEADLINE_EXCEEDED
│   ├── CancelledError             CANCELLED
│   ├── NoTokenizerError           FAILED_PRECONDITION
│   ├── UnknownModelError          NOT_FOUND
│   ├── UnknownRequestError        NOT_FOUND
│   └── UnavailableError           UNAVAILABLE (draining, or the engine loop has died)
└── InvariantError       a bug in trtc                                       exit 70
"""

from typing import ClassVar


class TrtcError(Exception):
    """One problem, said once.

    Args:
        problem: what is wrong, in one sentence without the field's name.
        field: the option, file, tensor or request field that is wrong ("" when there is none).
        remedy: what the reader can do now ("" when nothing can be done).
    """

    exit_code: ClassVar[int] = 1
    grpc_status: ClassVar[str] = "INTERNAL"

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
    grpc_status = "INVALID_ARGUMENT"


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
    grpc_status = "FAILED_PRECONDITION"


class EngineCorruptError(EngineError):
    pass


class EngineIncompatibleError(EngineError):
    pass


class EnvironmentFault(TrtcError):
    exit_code = 5
    grpc_status = "FAILED_PRECONDITION"


class ServeError(TrtcError):
    exit_code = 6


class InvalidRequestError(ServeError):
    grpc_status = "INVALID_ARGUMENT"


class QueueFullError(ServeError):
    grpc_status = "RESOURCE_EXHAUSTED"


class DeadlineError(ServeError):
    grpc_status = "DEADLINE_EXCEEDED"


class CancelledError(ServeError):
    grpc_status = "CANCELLED"


class NoTokenizerError(ServeError):
    grpc_status = "FAILED_PRECONDITION"


class UnknownModelError(ServeError):
    grpc_status = "NOT_FOUND"


class UnknownRequestError(ServeError):
    grpc_status = "NOT_FOUND"


class UnavailableError(ServeError):
    grpc_status = "UNAVAILABLE"


class InvariantError(TrtcError):
    exit_code = 70
