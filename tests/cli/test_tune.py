"""`trtc tune`: what it keeps in an engine, and what it refuses."""

from pathlib import Path

import msgspec
import pytest

from tests.support.manifests import tiny_manifest
from trtc.cli import main
from trtc.commands.tune import store
from trtc.protos.errors import OutputError
from trtc.protos.launch_plan import Tactic, TacticTable, read_tactics
from trtc.protos.manifest import MANIFEST_FILE, TACTICS_PREFIX, Manifest, read_manifest
from trtc.quant.hashing import file_facts
from trtc.runtime.integrity.verify import verify_files


def table_of(variant: int) -> TacticTable:
    tactic = Tactic(
        sites=("layers.0.mlp.down", "layers.1.mlp.down"),
        kind="decode",
        rows=64,
        variant=variant,
        microseconds=18.5,
        default_microseconds=20.25,
    )
    return TacticTable(device="a GPU", tactics=(tactic,))


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    (tmp_path / "launches.json").write_text("{}")
    write(tmp_path, "cuda")
    return tmp_path


def write(engine: Path, kind: str) -> Manifest:
    manifest = tiny_manifest(files={"launches.json": file_facts(engine / "launches.json")})
    target = msgspec.structs.replace(manifest.target, kind=kind)
    sealed = msgspec.structs.replace(manifest, target=target).sealed()
    (engine / MANIFEST_FILE).write_bytes(sealed.to_json())
    return sealed


def test_tactics_are_part_of_the_engine(engine: Path) -> None:
    store(engine, read_manifest(engine), table_of(2))
    manifest = read_manifest(engine)
    verify_files(engine, manifest)
    (name,) = [name for name in manifest.files if name.startswith(TACTICS_PREFIX)]
    assert read_tactics(engine / name) == table_of(2)


def test_tuning_again_replaces_what_was_found_before(engine: Path) -> None:
    first = store(engine, read_manifest(engine), table_of(2))
    second = store(engine, first, table_of(3))
    verify_files(engine, read_manifest(engine))
    assert second.digest != first.digest
    files = {path.name for path in engine.iterdir()}
    assert files == {MANIFEST_FILE, *second.files}, "the old table, or a partial one, is left"
    store(engine, second, table_of(3))
    verify_files(engine, read_manifest(engine))


def test_an_engine_that_cannot_be_written_stays_as_it_was(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (engine / MANIFEST_FILE).read_bytes()

    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OutputError, match="No space left"):
        store(engine, read_manifest(engine), table_of(2))
    assert (engine / MANIFEST_FILE).read_bytes() == before
    verify_files(engine, read_manifest(engine))


def test_a_cpu_engine_has_nothing_to_tune(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "launches.json").write_text("{}")
    write(tmp_path, "cpu")
    assert main(["tune", str(tmp_path)]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "target.kind: is cpu, and only CUDA engines" in last
