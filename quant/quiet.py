"""Silences output, warnings and progress bars of vendor libraries during a build."""

import contextlib
import io
import logging
import sys
import warnings
from collections.abc import Iterator
from typing import Any


class _Discard(io.TextIOBase):
    """Drops what libraries print; rich finds the real stream under the name it looks for."""

    def __init__(self, real: Any) -> None:
        self.rich_proxied_file = getattr(real, "rich_proxied_file", real)

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        return len(text)


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Silence stdout, stderr, warnings and logs below ERROR; exceptions pass."""
    previous_level = logging.root.manager.disable
    with (
        contextlib.redirect_stdout(_Discard(sys.stdout)),
        contextlib.redirect_stderr(_Discard(sys.stderr)),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        logging.disable(max(previous_level, logging.WARNING))
        try:
            yield
        finally:
            logging.disable(previous_level)
