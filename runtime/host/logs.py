"""Loggers of the modules that every start of an engine imports."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import logging


def logger(name: str) -> "logging.Logger":
    """`logging.getLogger`, imported by the first message: a start that has none does without."""
    import logging

    return logging.getLogger(name)
