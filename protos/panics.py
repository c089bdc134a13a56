"""Converts failures of the `tokenizers` library, whose Rust code may panic, to trtc's errors.

A panic reaches Python as pyo3's PanicException, which is no Exception: left alone, it ends the
thread that it meets, and whoever waits for that thread waits for ever.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from trtc.protos.errors import TrtcError

_PANIC = "PanicException"
_MAX_CHARACTERS = 200


@contextmanager
def tokenizer_failures(as_error: Callable[[str], TrtcError]) -> Iterator[None]:
    """Raise `as_error(problem)` for whatever the library raises; TrtcErrors pass.

    Args:
        as_error: of one line of bounded length.
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
    """The text of an error that a file's author may have written."""
    text = " ".join((str(error) or type(error).__name__)[: 2 * _MAX_CHARACTERS].split())
    return text[:_MAX_CHARACTERS]
