"""A model by its name on the hub, from the cache of this machine alone, at a revision."""

import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from tests.support.models import tiny_checkpoint
from trtc.builder.checkpoint.resolve import hub_commit, model_name, resolve_model
from trtc.builder.pipeline import build
from trtc.builder.request import BuildRequest
from trtc.builder.targets.cpu import CpuTarget
from trtc.plugins.cpu.host import runnable_isas
from trtc.protos.errors import CheckpointError
from trtc.protos.manifest import read_manifest

NAME = "some-owner/some-model"
MAIN, TAGGED = "a" * 40, "b" * 40


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The layout that huggingface_hub writes: references to commits, and their snapshots."""
    from huggingface_hub import constants

    made = tiny_checkpoint("llama", tmp_path / "made")
    repository = tmp_path / "hub" / "models--some-owner--some-model"
    for reference, commit in (("main", MAIN), ("v1", TAGGED)):
        shutil.copytree(made, repository / "snapshots" / commit)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / reference).write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return repository


def test_a_revision_is_found_by_branch_tag_and_commit(hub_cache: Path) -> None:
    for revision, commit in ((None, MAIN), ("main", MAIN), ("v1", TAGGED), (TAGGED, TAGGED)):
        found = resolve_model(NAME, revision)
        assert found == hub_cache / "snapshots" / commit
        assert hub_commit(found) == commit


def test_a_snapshot_has_the_name_of_its_model(hub_cache: Path, tmp_path: Path) -> None:
    assert model_name(resolve_model(NAME)) == "some-model"
    assert model_name(hub_cache / "snapshots" / TAGGED) == "some-model"
    (tmp_path / "snapshots" / "mine").mkdir(parents=True)
    assert model_name(tmp_path / "snapshots" / "mine") == "mine"


def test_a_revision_that_the_cache_lacks(hub_cache: Path) -> None:
    with pytest.raises(CheckpointError, match=f"--model {NAME}"):
        resolve_model(NAME, "v2")


def test_the_manifest_names_the_commit(
    hub_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    snapshot_download = huggingface_hub.snapshot_download

    def counted(name: str, **options: Any) -> str:
        asked.append((name, options["revision"]))
        return snapshot_download(name, **options)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", counted)
    request = BuildRequest(
        NAME,
        tmp_path / "engine",
        revision="v1",
        max_seq_len=64,
        max_batch_size=2,
        dummy_weights=True,
    )
    build(request, target=CpuTarget(runnable_isas()[:1], optimization="-O0"))
    model = read_manifest(tmp_path / "engine").model
    assert (model.name, model.revision) == ("some-model", TAGGED)
    assert asked == [(NAME, "v1")], "a branch may move between two questions"
