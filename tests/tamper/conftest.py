"""One engine with a tokenizer, and copies of it to tamper with."""

import shutil
from pathlib import Path

import pytest

from tests.support.engines import build_tiny
from tests.support.servers import TOKENIZER


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("engines") / "pyllama"
    build_tiny(TOKENIZER, path, "bf16", max_seq_len=256, max_batch_size=8, max_num_tokens=64)
    return path


@pytest.fixture
def engine(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "engine"))
