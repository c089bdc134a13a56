"""`trtc package` as a user types it: what appears, what stays, what is refused."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from tests.support.manifests import tiny_manifest, write_engine
from trtc.cli import main
from trtc.protos.manifest import Limits, TargetFacts

FILES = {"weights.safetensors": "weights", "tokenizer/tokenizer.json": "{}"}


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    return write_engine(tmp_path / "engine", FILES)


def listing(directory: Path) -> list[str]:
    return sorted(
        path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()
    )


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """The one line that a failing command says."""
    assert main(["package", *map(str, arguments)]) != 0
    return capsys.readouterr().err.splitlines()[-1]


def test_a_repository_holds_all_that_the_server_needs(
    engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "models"
    assert main(["package", str(engine), str(out), "--format", "triton", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said == {"repository": str(out), "model": "tiny", "version": 1}
    assert listing(out) == [
        "tiny/1/engine/manifest.json",
        "tiny/1/engine/tokenizer/tokenizer.json",
        "tiny/1/engine/weights.safetensors",
        "tiny/1/model.py",
        "tiny/config.pbtxt",
    ]
    assert not [path for path in out.rglob("*") if path.is_symlink()]
    shutil.rmtree(engine)
    assert (out / "tiny/1/engine/weights.safetensors").read_text() == "weights"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["models"]


@pytest.mark.parametrize("spelling", ["models", "models/.", "models/../models", "link"])
def test_a_server_never_sees_half_a_model(
    spelling: str, engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/link").symlink_to(tmp_path / "models")
    link, seen = os.link, list[list[Path]]()

    def watch(source: Path, target: Path) -> None:
        seen.append(list((tmp_path / "models").iterdir()))
        link(source, target)

    monkeypatch.setattr(os, "link", watch)
    out = tmp_path / ("elsewhere" if spelling == "link" else "") / spelling
    assert main(["package", str(engine), os.fspath(out)]) == 0
    assert seen == [[], [], []]
    assert len(listing(tmp_path / "models")) == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "engine", "models"]


def test_weights_are_on_the_disk_once(engine: Path, tmp_path: Path) -> None:
    assert main(["package", str(engine), str(tmp_path / "models")]) == 0
    placed = tmp_path / "models/tiny/1/engine/weights.safetensors"
    assert placed.samefile(engine / "weights.safetensors")


def test_files_are_copied_where_links_are_impossible(
    engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(source: Path, target: Path) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", link)
    assert main(["package", str(engine), str(tmp_path / "models")]) == 0
    placed = tmp_path / "models/tiny/1/engine/weights.safetensors"
    assert placed.read_text() == "weights"
    assert placed.stat().st_nlink == 1


def test_a_link_in_the_engine_becomes_a_file(engine: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "blob"
    (engine / "weights.safetensors").rename(elsewhere)
    (engine / "weights.safetensors").symlink_to(elsewhere)
    assert main(["package", str(engine), str(tmp_path / "models")]) == 0
    assert not (tmp_path / "models/tiny/1/engine/weights.safetensors").is_symlink()


def test_models_and_versions_stand_beside_each_other(engine: Path, tmp_path: Path) -> None:
    out = tmp_path / "models"
    assert main(["package", str(engine), str(out)]) == 0
    config = out / "tiny/config.pbtxt"
    config.write_text(config.read_text() + "# an operator's own\n")
    assert main(["package", str(engine), str(out), "--version", "2"]) == 0
    assert main(["package", str(engine), str(out), "--name", "other-1.5"]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["other-1.5", "tiny"]
    assert sorted(path.name for path in (out / "tiny").iterdir()) == ["1", "2", "config.pbtxt"]
    assert config.read_text().endswith("# an operator's own\n")
    assert 'name: "other-1.5"' in (out / "other-1.5/config.pbtxt").read_text()


def test_a_version_that_is_there_is_replaced_by_force_only(
    engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "models"
    assert main(["package", str(engine), str(out)]) == 0
    newer = write_engine(tmp_path / "newer", FILES | {"weights.safetensors": "newer"})
    said = refused(capsys, newer, out)
    assert said.endswith("tiny/1: exists already. Choose another --version, or give --force")
    assert (out / "tiny/1/engine/weights.safetensors").read_text() == "weights"
    assert main(["package", str(newer), str(out), "--force"]) == 0
    assert (out / "tiny/1/engine/weights.safetensors").read_text() == "newer"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["engine", "models", "newer"]


def test_versions_share_one_configuration(
    engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "models"
    assert main(["package", str(engine), str(out)]) == 0
    wider = Limits(max_batch_size=9, max_seq_len=128, max_num_tokens=64)
    other = write_engine(tmp_path / "other", FILES, limits=wider)
    assert "need another config.pbtxt" in refused(capsys, other, out, "--version", "2")
    assert [path.name for path in (out / "tiny").iterdir() if path.is_dir()] == ["1"]


def test_a_model_of_someone_else_is_left_alone(
    engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = tmp_path / "models/tiny/1/model.py"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("theirs")
    said = refused(capsys, engine, tmp_path / "models", "--force")
    assert "is not a model that trtc packaged" in said
    (tmp_path / "models/tiny/config.pbtxt").write_text("theirs")
    said = refused(capsys, engine, tmp_path / "models", "--force", "--version", "2")
    assert "is a model of which trtc packaged no version" in said
    assert listing(tmp_path / "models") == ["tiny/1/model.py", "tiny/config.pbtxt"]


def test_a_damaged_engine_is_not_packaged(
    engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (engine / "weights.safetensors").write_text("weighty")
    said = refused(capsys, engine, tmp_path / "models")
    assert "engine/weights.safetensors: the content differs" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["engine"]


def test_a_full_disk_leaves_nothing_behind(
    engine: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "link", full)
    monkeypatch.setattr(shutil, "copyfile", full)
    assert "the disk is full" in refused(capsys, engine, tmp_path / "deep" / "models")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["engine"]


@pytest.mark.parametrize("name", ["", ".hidden", "-x", "a/b", "a b", ".."])
def test_a_name_that_is_no_model_is_refused(
    name: str, engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"--name: cannot be {name!r}" in refused(capsys, engine, tmp_path / "o", "--name", name)


def test_a_mount_point_is_refused(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "/proc: is a mount point" in refused(capsys, engine, "/proc")


def test_a_directory_without_an_engine_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, tmp_path / "nothing", tmp_path / "models")
    assert "nothing: manifest.json cannot be read" in said


def test_engines_of_several_gpus_become_one_model(tmp_path: Path) -> None:
    engines = []
    for sm in (80, 90):
        target = TargetFacts(kind="cuda", name=f"cuda:sm_{sm}", archs=(f"sm_{sm}",), toolchain="")
        files = FILES | {"weights.safetensors": f"for sm_{sm}"}
        engines.append(str(write_engine(tmp_path / f"e{sm}", files, target=target)))
    assert main(["package", *engines, str(tmp_path / "models"), "--name", "both"]) == 0
    model = tmp_path / "models/both"
    for sm in (80, 90):
        text = (model / f"1/sm_{sm}/weights.safetensors").read_text()
        assert text == f"for sm_{sm}"
    config = (model / "config.pbtxt").read_text()
    assert 'cc_model_filenames { key: "9.0" value: "sm_90" }' in config
    assert "kind: KIND_GPU" in config
    assert tiny_manifest().limits.max_batch_size == 4
    assert "max_batch_size: 4" in config
