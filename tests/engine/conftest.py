"""Tiny engines, each compiled once a session."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.support.engines import build_tiny
from tests.support.models import tiny_checkpoint

Engines = Callable[[str], tuple[Path, Path]]


@pytest.fixture(scope="session")
def tiny_engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    """Family -> (checkpoint, its fp32 engine)."""

    @cache
    def engine_of(family: str) -> tuple[Path, Path]:
        directory = tmp_path_factory.mktemp(family)
        checkpoint = tiny_checkpoint(family, directory)
        build_tiny(checkpoint, directory / "engine", optimization="-O0")
        return checkpoint, directory / "engine"

    return engine_of
