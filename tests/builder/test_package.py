"""An engine directory appears whole or not at all."""

import errno
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.manifests import tiny_manifest
from trtc.builder import package
from trtc.builder.package import Workspace, check_output, publish, seal, workspace
from trtc.protos.errors import OutputError
from trtc.protos.manifest import read_manifest


def make(output: Path, content: str = "new", *, force: bool = False) -> None:
    with workspace(output, force=force) as work:
        (work.engine / "a").write_text(content)
        (work.engine / "sub").mkdir()
        (work.engine / "sub" / "b").write_text("b")
        (work.scratch / "temporary").write_text("gone")
        publish(work, tiny_manifest(), force=force)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_published_engine_has_its_files_and_their_hashes(tmp_path: Path) -> None:
    make(tmp_path / "engine")
    assert names(tmp_path) == ["engine"]
    assert names(tmp_path / "engine") == ["a", "manifest.json", "sub"]
    manifest = read_manifest(tmp_path / "engine")
    assert sorted(manifest.files) == ["a", "sub/b"]
    assert manifest.files["a"].bytes == 3
    assert manifest.files["a"].sha256.startswith("11507a0e2f5e69d5")


def test_nothing_is_visible_before_it_is_published(tmp_path: Path) -> None:
    with workspace(tmp_path / "engine", force=False) as work:
        (work.engine / "a").write_text("x")
        assert not (tmp_path / "engine").exists()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failed_build_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    output = tmp_path / "new" / "parents" / "engine"
    with pytest.raises(error), workspace(output, force=False) as work:
        (work.engine / "a").write_text("x")
        raise error
    assert names(tmp_path) == []


def test_missing_parents_are_made(tmp_path: Path) -> None:
    make(tmp_path / "a" / "b" / "engine")
    assert read_manifest(tmp_path / "a" / "b" / "engine")


def test_an_engine_is_replaced_only_by_force(tmp_path: Path) -> None:
    make(tmp_path / "engine", "old")
    with pytest.raises(OutputError, match=r"exists already.*--force"):
        make(tmp_path / "engine")
    assert (tmp_path / "engine" / "a").read_text() == "old"
    make(tmp_path / "engine", force=True)
    assert (tmp_path / "engine" / "a").read_text() == "new"
    assert names(tmp_path) == ["engine"]


def test_the_old_engine_stays_until_the_new_one_is_ready(tmp_path: Path) -> None:
    make(tmp_path / "engine", "old")
    with pytest.raises(RuntimeError), workspace(tmp_path / "engine", force=True) as work:
        (work.engine / "a").write_text("half")
        assert (tmp_path / "engine" / "a").read_text() == "old"
        raise RuntimeError
    assert (tmp_path / "engine" / "a").read_text() == "old"
    assert names(tmp_path) == ["engine"]


def test_replacing_works_without_an_exchange(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "engine", "old")
    monkeypatch.setattr(package, "_exchange", lambda first, second: False)
    make(tmp_path / "engine", force=True)
    assert (tmp_path / "engine" / "a").read_text() == "new"
    assert names(tmp_path) == ["engine"]


def test_force_replaces_no_stranger(tmp_path: Path) -> None:
    stranger = tmp_path / "home"
    stranger.mkdir()
    (stranger / "precious").write_text("x")
    with pytest.raises(OutputError, match="is not an engine"):
        check_output(stranger, force=True)
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputError, match="is not an engine"):
        check_output(tmp_path / "file", force=True)


def test_an_empty_directory_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    make(tmp_path / "engine")
    assert read_manifest(tmp_path / "engine")


def test_an_output_that_appears_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    with (
        pytest.raises(OutputError, match="exists already"),
        workspace(tmp_path / "engine", force=False) as work,
    ):
        make(tmp_path / "engine", "faster")
        publish(work, tiny_manifest(), force=False)
    assert (tmp_path / "engine" / "a").read_text() == "faster"
    assert names(tmp_path) == ["engine"]


@pytest.mark.parametrize(
    ("number", "message"),
    [(errno.ENOSPC, "disk is full"), (errno.EROFS, "read-only"), (errno.EDQUOT, "quota")],
)
def test_disk_errors_are_said_once_and_leave_nothing(
    tmp_path: Path, number: int, message: str
) -> None:
    with (
        pytest.raises(OutputError, match=message) as caught,
        workspace(tmp_path / "engine", force=False),
    ):
        raise OSError(number, "as the system says it")
    assert caught.value.field == str(tmp_path / "engine")
    assert names(tmp_path) == []


def test_other_errors_of_the_system_pass_through(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), workspace(tmp_path / "engine", force=False):
        raise FileNotFoundError(errno.ENOENT, "a bug")


def test_a_real_full_disk(tmp_path: Path) -> None:
    """/dev/full fails as a disk does, when the buffer is flushed."""
    with (
        pytest.raises(OutputError, match="disk is full"),
        workspace(tmp_path / "engine", force=False) as work,
        Path("/dev/full").open("w") as device,
    ):
        (work.engine / "a").write_text("x")
        device.write("x")
        device.flush()
    assert names(tmp_path) == []


_KILLED = """
import sys, time
from pathlib import Path
from trtc.builder.package import workspace
with workspace(Path(sys.argv[1]), force=False) as work:
    (work.engine / "a").write_text("half")
    print("ready", flush=True)
    time.sleep(60)
"""


def test_what_a_killed_build_left_is_removed_by_the_next(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _KILLED, str(tmp_path / "engine")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        assert len(names(tmp_path)) == 1
        # While it lives it is left alone.
        with workspace(tmp_path / "engine", force=False):
            assert len(names(tmp_path)) == 2
        assert len(names(tmp_path)) == 1
        child.send_signal(signal.SIGKILL)
    assert len(names(tmp_path)) == 1
    make(tmp_path / "engine")
    assert names(tmp_path) == ["engine"]


def test_known_hashes_are_not_computed_again(tmp_path: Path) -> None:
    work = Workspace(tmp_path / "out", tmp_path / "engine", tmp_path / "scratch")
    work.engine.mkdir()
    (work.engine / "big").write_text("x")
    first = seal(work.engine, tiny_manifest())
    (work.engine / "report").write_text("y")
    marked = {"big": first.files["big"]}
    second = seal(work.engine, tiny_manifest(), marked)
    assert second.files["big"] is marked["big"]
    assert set(second.files) == {"big", "report"}
