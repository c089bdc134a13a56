"""An engine directory appears whole or not at all."""

import errno
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.support.manifests import tiny_manifest
from trtc.builder.package import check_output, publish, seal, workspace
from trtc.protos import staging
from trtc.protos.errors import EngineIncompatibleError, OutputError
from trtc.protos.manifest import MANIFEST_FILE, read_manifest
from trtc.protos.recognition import record_digest
from trtc.protos.staging import Staging


def make(output: Path, content: str = "new", *, force: bool = False) -> None:
    with workspace(output, force=force) as work:
        (work.new / "a").write_text(content)
        (work.new / "sub").mkdir()
        (work.new / "sub" / "b").write_text("b")
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
        (work.new / "a").write_text("x")
        assert not (tmp_path / "engine").exists()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failed_build_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    output = tmp_path / "new" / "parents" / "engine"
    with pytest.raises(error), workspace(output, force=False) as work:
        (work.new / "a").write_text("x")
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
        (work.new / "a").write_text("half")
        assert (tmp_path / "engine" / "a").read_text() == "old"
        raise RuntimeError
    assert (tmp_path / "engine" / "a").read_text() == "old"
    assert names(tmp_path) == ["engine"]


def test_replacing_works_without_an_exchange(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "engine", "old")
    monkeypatch.setattr(staging, "_exchange", lambda first, second: False)
    make(tmp_path / "engine", force=True)
    assert (tmp_path / "engine" / "a").read_text() == "new"
    assert names(tmp_path) == ["engine"]


def test_force_replaces_no_stranger(tmp_path: Path) -> None:
    stranger = tmp_path / "home"
    stranger.mkdir()
    (stranger / "precious").write_text("x")
    with pytest.raises(OutputError, match="is not an engine of trtc's"):
        check_output(stranger, force=True)
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputError, match="is not an engine of trtc's"):
        check_output(tmp_path / "file", force=True)


@pytest.mark.parametrize("name", ["thesis.txt", "sub/thesis.txt", ".notes", "empty/"])
def test_force_loses_no_file_that_is_not_the_engines(tmp_path: Path, name: str) -> None:
    """Somebody put a file of theirs beside an engine's own."""
    make(tmp_path / "engine", "old")
    foreign = tmp_path / "engine" / name
    foreign.mkdir() if name.endswith("/") else foreign.write_text("mine")
    with pytest.raises(OutputError, match=rf"holds {name.rstrip('/')}, .*remove it yourself"):
        make(tmp_path / "engine", force=True)
    assert foreign.exists() and (tmp_path / "engine" / "a").read_text() == "old"
    assert names(tmp_path) == ["engine"]


def test_force_loses_no_file_that_comes_at_the_last_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the last look at the output, and before it is exchanged."""
    make(tmp_path / "engine", "old")
    exchange = staging._exchange

    def late(first: Path, second: Path) -> bool:
        if not (first / "thesis.txt").exists():
            (second / "thesis.txt").write_text("mine")
        return exchange(first, second)

    monkeypatch.setattr(staging, "_exchange", late)
    with pytest.raises(OutputError, match=r"holds thesis\.txt"):
        make(tmp_path / "engine", "new", force=True)
    assert (tmp_path / "engine" / "thesis.txt").read_text() == "mine"
    assert (tmp_path / "engine" / "a").read_text() == "old"
    assert names(tmp_path) == ["engine"]


def test_a_manifest_alone_makes_no_engine(tmp_path: Path) -> None:
    """Web applications and browser extensions have a manifest.json too."""
    stranger = tmp_path / "app"
    stranger.mkdir()
    for text in ('{"name": "app"}', "{}", "[]", "", '{"digest": "0", "files": 3}', "[" * 100_000):
        (stranger / MANIFEST_FILE).write_text(text)
        with pytest.raises(OutputError, match=r"no manifest\.json that trtc wrote"):
            make(stranger, force=True)
    assert names(stranger) == [MANIFEST_FILE]


def test_an_engine_of_another_version_is_replaced(tmp_path: Path) -> None:
    """Its schema is unknown; its digest is over whatever its manifest says."""
    make(tmp_path / "engine", "old")
    path = tmp_path / "engine" / MANIFEST_FILE
    content = msgspec.json.decode(path.read_bytes())
    content |= {"schema_version": 99, "unheard_of": {"b": [1, 2.5, None], "a": "x"}}
    content["digest"] = record_digest(content)
    path.write_bytes(msgspec.json.encode(content))
    with pytest.raises(EngineIncompatibleError):
        read_manifest(tmp_path / "engine")
    make(tmp_path / "engine", force=True)
    assert (tmp_path / "engine" / "a").read_text() == "new"


def test_a_damaged_engine_is_replaced_unless_a_file_was_changed(tmp_path: Path) -> None:
    make(tmp_path / "engine", "old")
    (tmp_path / "engine" / "sub" / "b").unlink()
    make(tmp_path / "engine", "newer", force=True)
    (tmp_path / "engine" / "a").write_text("a longer text of the user's")
    with pytest.raises(OutputError, match="a in it has been changed"):
        make(tmp_path / "engine", force=True)


def test_an_empty_directory_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    make(tmp_path / "engine")
    assert read_manifest(tmp_path / "engine")


def test_an_output_that_appears_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    make(tmp_path / "faster", "faster")
    with (
        pytest.raises(OutputError, match="exists already"),
        workspace(tmp_path / "engine", force=False) as work,
    ):
        (tmp_path / "faster").rename(tmp_path / "engine")
        publish(work, tiny_manifest(), force=False)
    assert (tmp_path / "engine" / "a").read_text() == "faster"
    assert names(tmp_path) == ["engine"]


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.ENOSPC, "disk is full"),
        (errno.EROFS, "read-only"),
        (errno.EDQUOT, "quota"),
        (errno.EFBIG, "ulimit -f"),
    ],
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
        (work.new / "a").write_text("x")
        device.write("x")
        device.flush()
    assert names(tmp_path) == []


_KILLED = """
import sys, time
from pathlib import Path
from trtc.builder.package import workspace
with workspace(Path(sys.argv[1]), force=False) as work:
    (work.new / "a").write_text("half")
    print("ready", flush=True)
    time.sleep(60)
"""


def test_what_a_killed_build_left_is_removed_by_the_next(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _KILLED, str(tmp_path / "engine")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        assert len(names(tmp_path)) == 1
        # While it lives it is left alone, and others are told.
        with pytest.raises(OutputError, match="another trtc is writing it"):
            make(tmp_path / "engine")
        assert len(names(tmp_path)) == 1
        child.send_signal(signal.SIGKILL)
    assert len(names(tmp_path)) == 1
    make(tmp_path / "engine")
    assert names(tmp_path) == ["engine"]


def test_known_hashes_are_not_computed_again(tmp_path: Path) -> None:
    work = Staging(tmp_path / "out", tmp_path / "engine", tmp_path / "scratch")
    work.new.mkdir()
    (work.new / "big").write_text("x")
    first = seal(work.new, tiny_manifest())
    (work.new / "report").write_text("y")
    marked = {"big": first.files["big"]}
    second = seal(work.new, tiny_manifest(), marked)
    assert second.files["big"] is marked["big"]
    assert set(second.files) == {"big", "report"}
