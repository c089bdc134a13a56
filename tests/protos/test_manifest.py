"""protos/manifest.py: what is written and what can be read."""

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.manifests import tiny_manifest
from trtc.protos.errors import EngineCorruptError, EngineIncompatibleError
from trtc.protos.manifest import MANIFEST_FILE, read_manifest, weights_files


def sealed_document(**target: Any) -> dict[str, Any]:
    """A manifest as plain JSON, sealed by hand."""
    document: dict[str, Any] = json.loads(tiny_manifest().to_json())
    document["target"] |= target
    document["digest"] = ""
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"))
    document["digest"] = hashlib.sha256(canonical.encode()).hexdigest()
    return document


def test_an_engine_of_one_rank_says_nothing_of_ranks(tmp_path: Path) -> None:
    """So manifests written before there were ranks are read, and their digests still hold."""
    document = sealed_document()
    assert "tp" not in document["target"]
    (tmp_path / MANIFEST_FILE).write_text(json.dumps(document))
    manifest = read_manifest(tmp_path)
    assert manifest.target.tp == 1
    assert manifest == tiny_manifest().sealed()


def test_ranks_are_under_the_digest(tmp_path: Path) -> None:
    document = sealed_document(tp=4)
    path = tmp_path / MANIFEST_FILE
    path.write_text(json.dumps(document))
    assert read_manifest(tmp_path).target.tp == 4
    document["target"]["tp"] = 2
    path.write_text(json.dumps(document))
    with pytest.raises(EngineCorruptError, match="digest"):
        read_manifest(tmp_path)


def test_each_rank_has_a_file_of_weights() -> None:
    assert weights_files(1) == ("weights.safetensors",)
    assert weights_files(2) == ("weights.rank0.safetensors", "weights.rank1.safetensors")


def test_how_gpus_share_a_model_is_said_by_its_names() -> None:
    alone = tiny_manifest().target
    both = msgspec.structs.replace(alone, tp=4, ep=True)
    assert alone.parallelism == ""
    assert msgspec.structs.replace(alone, tp=2).parallelism == "2 GPUs (tensor parallelism)"
    assert both.parallelism == "4 GPUs (tensor and expert parallelism)"


def test_a_manifest_reads_back(tmp_path: Path) -> None:
    target = msgspec.structs.replace(tiny_manifest().target, tp=8)
    manifest = tiny_manifest(target=target).sealed()
    (tmp_path / MANIFEST_FILE).write_bytes(manifest.to_json())
    assert read_manifest(tmp_path) == manifest


def test_a_format_of_answers_that_is_not_known_is_refused(tmp_path: Path) -> None:
    path = tmp_path / MANIFEST_FILE
    path.write_bytes(tiny_manifest(answer_format="hermes").sealed().to_json())
    assert read_manifest(tmp_path).format_name == "hermes"
    path.write_bytes(tiny_manifest(answer_format="later").sealed().to_json())
    with pytest.raises(EngineIncompatibleError, match=r"answer_format: is 'later'"):
        read_manifest(tmp_path)
