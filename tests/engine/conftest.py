"""Tiny engines, each compiled once a session."""

from functools import cache
from pathlib import Path
from typing import Protocol

import pytest

from tests.support.engines import build_tiny
from tests.support.models import tiny_checkpoint


class Engines(Protocol):
    """Family -> (checkpoint, its fp32 engine)."""

    def __call__(self, family: str, kv_dtype: str | None = None) -> tuple[Path, Path]: ...


@pytest.fixture(scope="session")
def tiny_engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    @cache
    def engine_of(family: str, kv_dtype: str | None = None) -> tuple[Path, Path]:
        directory = tmp_path_factory.mktemp(family)
        checkpoint = tiny_checkpoint(family, directory)
        build_tiny(checkpoint, directory / "engine", kv_dtype=kv_dtype)
        return checkpoint, directory / "engine"

    return engine_of
