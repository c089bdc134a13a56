"""Writers of one output at once, and writers that are told to end: nothing is left, nothing lost.

Everything here is done with real processes.
"""

import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from trtc.protos import staging
from trtc.protos.errors import OutputError
from trtc.protos.outputs import OutputKind, new_directory
from trtc.quant.record import CHECKPOINT

_WRITER = """
import sys, time
from pathlib import Path
from trtc.protos.errors import OutputError
from trtc.protos.signals import SignalExit, signals_as_exceptions
from trtc.protos.outputs import new_directory
from trtc.quant.record import CHECKPOINT, write_record

output, text, seconds, force = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]), len(sys.argv) > 4
print("starting", flush=True)
try:
    with signals_as_exceptions():
        for _ in range(int(sys.argv[5]) if force and len(sys.argv) > 5 else 1):
            with new_directory(output, CHECKPOINT, force=force) as directory:
                (directory / "text").write_text(text)
                (directory / "more").write_bytes(bytes(1 << 16))
                write_record(directory, "0", {})
                print("ready", flush=True)
                time.sleep(seconds)
except OutputError as error:
    sys.exit(str(error))
except SignalExit as error:
    sys.exit(error.exit_code)
except KeyboardInterrupt:
    sys.exit(130)
"""


def as_in_a_terminal() -> None:
    """A shell may run the tests with signals ignored: in the background, or by nohup."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def writer(
    output: Path,
    text: str,
    seconds: float,
    *more: str,
    prepare: Callable[[], None] = as_in_a_terminal,
) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", _WRITER, str(output), text, str(seconds), *more]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=prepare,
    )


def wait_for(process: "subprocess.Popen[str]", word: str) -> None:
    assert process.stdout is not None
    assert any(line.strip() == word for line in process.stdout)


def test_of_many_writers_at_once_one_wins_and_the_others_are_told(tmp_path: Path) -> None:
    output = tmp_path / "new" / "parents" / "output"
    writers = [writer(output, str(number), 1.0) for number in range(6)]
    endings = [(one.communicate(timeout=60)[1], one.returncode) for one in writers]
    assert [status for _, status in endings].count(0) == 1
    winner = next(number for number, (_, status) in enumerate(endings) if status == 0)
    for errors, status in endings[:winner] + endings[winner + 1 :]:
        assert status == 1 and len(errors.splitlines()) == 1
        assert str(output) in errors
        assert "another trtc is writing it" in errors or "exists already" in errors
    assert (output / "text").read_text() == str(winner)
    assert [path.name for path in output.parent.iterdir()] == ["output"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    process = writer(tmp_path / "parents" / "output", "x", 60)
    wait_for(process, "ready")
    process.send_signal(number)
    assert process.wait(timeout=60) == 128 + number
    process.communicate()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("raised", "is_kept"), [(KeyboardInterrupt, True), (SystemExit, True), (ValueError, False)]
)
def test_a_journal_outlives_an_interruption_and_no_error(
    tmp_path: Path, raised: type[BaseException], is_kept: bool
) -> None:
    output = tmp_path / "output"
    with pytest.raises(raised), staging.staging(output) as work:
        work.journal.mkdir()
        (work.journal / "layer").write_text("done")
        (work.new / "text").write_text("half")
        raise raised
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["layer"] * is_kept
    with staging.staging(output) as work:
        assert (work.journal / "layer").exists() is is_kept
        assert not any(work.new.iterdir())
    assert list(tmp_path.iterdir()) == []


def test_signals_at_random_moments_leave_one_whole_output(tmp_path: Path) -> None:
    """Writers that replace an output all the time, ended in the midst of anything."""
    output = tmp_path / "output"
    writer(output, "first", 0).communicate(timeout=60)
    moments = random.Random(1)
    for number in (*[signal.SIGTERM, signal.SIGINT, signal.SIGHUP] * 3, signal.SIGKILL):
        process = writer(output, "second", 0, "--force", "1000000")
        wait_for(process, "ready")
        time.sleep(moments.random() / 20)
        process.send_signal(number)
        process.communicate(timeout=60)
        assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
        assert (output / "text").read_text() in ("first", "second")
        if number != signal.SIGKILL:
            assert [path.name for path in tmp_path.iterdir()] == ["output"]
    writer(output, "third", 0, "--force").communicate(timeout=60)
    assert (output / "text").read_text() == "third"
    assert [path.name for path in tmp_path.iterdir()] == ["output"]


def ignore_hangup() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def test_an_ignored_hangup_stays_ignored(tmp_path: Path) -> None:
    """As under nohup."""
    process = writer(
        tmp_path / "output",
        "x",
        1.0,
        prepare=ignore_hangup,
    )
    wait_for(process, "ready")
    process.send_signal(signal.SIGHUP)
    errors = process.communicate(timeout=60)[1]
    assert (process.returncode, errors) == (0, "")
    assert (tmp_path / "output").exists()


def test_a_limit_of_file_sizes_is_said_in_one_line(tmp_path: Path) -> None:
    """`ulimit -f`: Python gets EFBIG where others die of SIGXFSZ."""
    limit = (1 << 12, 1 << 12)
    process = writer(
        tmp_path / "output",
        "x",
        0,
        prepare=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit),
    )
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == 1
    assert len(errors.splitlines()) == 1 and "`ulimit -f`" in errors and "output" in errors
    assert list(tmp_path.iterdir()) == []


def test_what_no_writer_made_is_not_removed(tmp_path: Path) -> None:
    """A directory of somebody's by the name that staging would have."""
    (tmp_path / ".output.partial").mkdir()
    (tmp_path / ".output.partial" / "thesis.txt").write_text("mine")
    with (
        pytest.raises(OutputError, match="trtc did not make it"),
        new_directory(tmp_path / "output", CHECKPOINT, force=False),
    ):
        pytest.fail("entered")
    assert (tmp_path / ".output.partial" / "thesis.txt").read_text() == "mine"
    assert not (tmp_path / "output").exists()


def test_an_output_moved_aside_by_a_killed_writer_comes_back(tmp_path: Path) -> None:
    """What a file system without exchange has between the two renames."""
    aside = tmp_path / ".output.partial" / "replaced"
    aside.mkdir(parents=True)
    (aside / "text").write_text("precious")
    (aside.parent / "lock").touch()
    with pytest.raises(KeyError), staging.staging(tmp_path / "output"):
        raise KeyError
    assert (tmp_path / "output" / "text").read_text() == "precious"
    assert [path.name for path in tmp_path.iterdir()] == ["output"]


def test_without_exchange_a_stranger_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "_exchange", lambda first, second: False)
    output = tmp_path / "output"
    output.mkdir()
    (output / "text").write_text("old")
    looks = iter([None, None, "it has changed"])
    kind = OutputKind("anything", lambda directory: next(looks))
    with (
        pytest.raises(OutputError, match="it has changed"),
        new_directory(output, kind, force=True) as directory,
    ):
        (directory / "text").write_text("new")
    assert (output / "text").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["output"]


def test_files_are_replaced_together_or_not_at_all(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text("old")
    (tmp_path / "b").unlink()
    (tmp_path / "b").mkdir()
    (tmp_path / ".c.partial").mkdir()
    with pytest.raises(OSError):
        staging.replace_files(tmp_path, {"a": b"new", "c": b"new"})
    assert (tmp_path / "a").read_text() == "old"
    (tmp_path / ".c.partial").rmdir()
    staging.replace_files(tmp_path, {"a": b"new", "c": b"new"})
    assert (tmp_path / "a").read_text() == "new" == (tmp_path / "c").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]


def test_a_directory_is_changed_by_one_at_a_time(tmp_path: Path) -> None:
    with (
        staging.claim_directory(tmp_path),
        pytest.raises(OutputError, match="another trtc"),
        staging.claim_directory(tmp_path),
    ):
        pytest.fail("entered")
    assert list(tmp_path.iterdir()) == []
