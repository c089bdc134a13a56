"""Converts failures of the `tokenizers` library, whose Rust code may panic, to trtc's errors.

A panic reaches Python as pyo3's PanicException, which is not an Exception: uncaught, it ends its
thread, and threads that wait for that one wait for ever.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from trtc.protos.errors import TrtcError

_PANIC = "PanicException"
_MAX_CHARACTERS = 200


@contextmanager
def tokenizer_failures(as_error: Callable[[str], TrtcError]) -> Iterator[None]:
    """Context manager that converts errors of the library to `as_error(problem)`; TrtcErrors pass.

    Args:
        as_error: makes the error from a problem of one line and bounded length.
    """
    try:
        yield
    except TrtcError:
        raise
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == _PANIC:
            raise as_error(one_line(error)) from error
        raise


def one_line(error: BaseException) -> str:
    """The text of an error, which may come from an untrusted file, in one bounded line."""
    text = " ".join((str(error) or type(error).__name__)[: 2 * _MAX_CHARACTERS].split())
    return text[:_MAX_CHARACTERS]
