"""What a manifest and the bill of materials say an engine was made of."""

import hashlib
import json
from importlib import metadata
from pathlib import Path

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL

from tests.support.engines import build_tiny
from tests.support.models import tiny_checkpoint
from trtc.builder.pipeline import BuildResult
from trtc.commands.engine_table import provenance_lines
from trtc.protos.manifest import SBOM_FILE, read_manifest
from trtc.version import __version__


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def built(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> BuildResult:
    return build_tiny(checkpoint, tmp_path_factory.mktemp("engine") / "engine", "bf16")


def test_the_manifest_has_the_checkpoints_digests(built: BuildResult, checkpoint: Path) -> None:
    provenance = read_manifest(built.path).provenance
    assert provenance is not None
    expected = {
        name: hashlib.sha256((checkpoint / name).read_bytes()).hexdigest()
        for name in ("config.json", "generation_config.json", "model.safetensors")
    }
    assert provenance.checkpoint == expected


def test_the_manifest_has_versions_and_options(built: BuildResult) -> None:
    provenance = read_manifest(built.path).provenance
    assert provenance is not None
    assert provenance.packages["trtc"] == __version__
    assert provenance.packages["torch"] == metadata.version("torch")
    assert "triton" not in provenance.packages  # compiles nothing of a CPU engine
    assert provenance.options["dtype"] == "bf16" and provenance.options["max_batch_size"] == "4"
    assert not {"model", "output", "force", "dummy_weights"} & set(provenance.options)
    assert str(built.path.parent) not in json.dumps(provenance.options)


def test_the_bill_of_materials_is_valid_and_complete(built: BuildResult) -> None:
    manifest = read_manifest(built.path)
    text = (built.path / SBOM_FILE).read_text()
    assert manifest.files[SBOM_FILE].sha256 == hashlib.sha256(text.encode()).hexdigest()
    problem = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    assert problem is None, problem
    document = json.loads(text)
    assert "timestamp" not in document["metadata"]
    found = {one["name"]: one for one in document["components"]}
    provenance = manifest.provenance
    assert provenance is not None
    assert set(found) == {*provenance.checkpoint, *provenance.packages}
    purl = PackageURL.from_string(found["torch"]["purl"])
    assert (purl.type, purl.name, purl.version) == ("pypi", "torch", metadata.version("torch"))
    weights = found["model.safetensors"]["hashes"][0]["content"]
    assert weights == provenance.checkpoint["model.safetensors"]


def test_the_same_build_gives_the_same_record(
    built: BuildResult, checkpoint: Path, tmp_path: Path
) -> None:
    again = build_tiny(checkpoint, tmp_path / "engine", "bf16")
    assert (again.path / SBOM_FILE).read_bytes() == (built.path / SBOM_FILE).read_bytes()
    assert again.manifest.digest == built.manifest.digest


def test_inspect_shows_where_an_engine_comes_from(built: BuildResult) -> None:
    text = "\n".join(provenance_lines(read_manifest(built.path)))
    assert "model.safetensors" in text and f"trtc {__version__}" in text and "dtype=bf16" in text
