"""Engines of several ranks on the command line."""

from pathlib import Path

import msgspec
import pytest

from tests.support.manifests import tiny_manifest
from trtc.cli import main
from trtc.protos.manifest import MANIFEST_FILE


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    """A manifest alone: nothing else is asked for."""
    manifest = tiny_manifest()
    target = msgspec.structs.replace(manifest.target, kind="cuda", name="cuda:sm_90", tp=2)
    sealed = msgspec.structs.replace(manifest, target=target).sealed()
    (tmp_path / MANIFEST_FILE).write_bytes(sealed.to_json())
    return tmp_path


def test_tactics_are_not_measured_on_several_gpus(
    engine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", str(engine)]) == 2
    error = capsys.readouterr().err
    assert "manifest.json: target.tp: is 2, and tactics are measured on one GPU" in error


def test_inspect_says_what_each_gpu_holds(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(engine)]) == 0
    told = capsys.readouterr().out
    assert "2 GPUs (tensor parallelism)" in told
    assert told.count("on each GPU") == 3
