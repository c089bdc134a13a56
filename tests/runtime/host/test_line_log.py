"""Lines are written whole, in order, off the caller's thread; what is lost is counted."""

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.aio import assert_no_threads
from trtc.protos.errors import RequestError
from trtc.runtime.host.line_log import LineLog, LineLogConfig

WRITE = os.write


def lost_line(number: int) -> bytes:
    return b"lost %d\n" % number


class Opened:
    def __init__(self, config: LineLogConfig) -> None:
        self.num_lost = 0
        self.log = LineLog(config, lost_line, self._count)

    def _count(self, number: int) -> None:
        self.num_lost += number

    def write(self, *lines: bytes) -> None:
        for line in lines:
            self.log.write(line + b"\n")


@contextmanager
def opened(path: Path, timeout_s: float = 10.0, **sizes: int) -> Iterator[Opened]:
    one = Opened(LineLogConfig(path, **sizes))
    try:
        yield one
    finally:
        one.log.close(timeout_s)
        assert_no_threads()


def all_lines(path: Path) -> list[bytes]:
    """Of the file and those it was rotated to, the oldest first."""
    rotated = sorted(path.parent.glob(f"{path.name}.*"), key=lambda one: -int(one.suffix[1:]))
    return b"".join(one.read_bytes() for one in (*rotated, path)).splitlines()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "audit.jsonl"


def test_what_was_written_before_the_close_is_in_the_file(path: Path) -> None:
    lines = [b"%d" % number for number in range(10_000)]
    with opened(path) as log:
        log.write(*lines)
    assert path.read_bytes().splitlines() == lines
    assert path.stat().st_mode & 0o777 == 0o600


def test_lines_of_several_threads_stay_whole(path: Path) -> None:
    def write(number: int) -> None:
        log.write(*(b"%d:%d" % (number, at) for at in range(500)))

    with opened(path, max_bytes=5000, num_kept=100) as log:
        threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    written = [tuple(map(int, line.split(b":"))) for line in all_lines(path)]
    for number in range(4):
        assert [at for owner, at in written if owner == number] == list(range(500))


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.integers(1, 300), max_size=80), max_bytes=st.integers(50, 400))
def test_rotation_loses_and_splits_no_line(
    sizes: list[int], max_bytes: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("log") / "audit.jsonl"
    lines = [b"x" * size for size in sizes]
    with opened(path, max_bytes=max_bytes, num_kept=200) as log:
        for line in lines:
            log.write(line)
    assert all_lines(path) == lines


def test_only_so_many_rotated_files_are_kept(path: Path) -> None:
    for number in range(8):
        with opened(path, max_bytes=10, num_kept=2) as log:
            log.write(b"line %d" % number)
    assert all_lines(path) == [b"line 5", b"line 6", b"line 7"]
    with opened(path, max_bytes=10, num_kept=0) as log:
        log.write(b"line 8")
    assert path.read_bytes() == b"line 8\n"


def test_it_goes_on_where_it_ended_and_ends_a_torn_line(path: Path) -> None:
    path.write_bytes(b"one\ntor")
    with opened(path) as log:
        log.write(b"two")
    assert path.read_bytes() == b"one\ntor\ntwo\n"


def test_a_file_that_was_moved_away_is_begun_anew(path: Path) -> None:
    with opened(path) as log:
        log.write(b"one")
        until(lambda: path.read_bytes() == b"one\n")
        path.rename(path.with_name("moved"))
        log.write(b"two")
        until(lambda: path.exists() and path.read_bytes() == b"two\n")
        path.unlink()
        log.write(b"three")
    assert path.read_bytes() == b"three\n"
    assert path.with_name("moved").read_bytes() == b"one\n"


class Disk:
    """What os.write does: as always, fail after so many bytes, or wait."""

    def __init__(self) -> None:
        self.num_free: int | None = None
        self.answers = threading.Event()
        self.answers.set()

    def write(self, descriptor: int, data: memoryview) -> int:
        self.answers.wait(20)
        if self.num_free is None:
            return WRITE(descriptor, data)
        if not self.num_free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = WRITE(descriptor, data[: self.num_free])
        self.num_free -= written
        return written


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk()
    monkeypatch.setattr("trtc.runtime.host.line_log.os.write", disk.write)
    monkeypatch.setattr("trtc.runtime.host.line_log.RETRY_S", 0.01)
    return disk


def test_a_full_disk_tears_no_line_and_is_waited_for(
    path: Path, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(path) as log:
        log.write(b"first")
        until(lambda: path.read_bytes() == b"first\n")
        disk.num_free = 4
        log.write(b"second", b"third")
        until(lambda: "No space left" in caplog.text)
        until(lambda: path.read_bytes() == b"first\n")
        disk.num_free = None
    assert path.read_bytes() == b"first\nsecond\nthird\n"
    assert log.num_lost == 0
    assert caplog.text.count("No space left") == 1


def test_a_disk_that_does_not_answer_holds_nobody_up_and_what_is_lost_is_said(
    path: Path, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(path, max_queued_bytes=100) as log:
        disk.answers.clear()
        begin = time.monotonic()
        log.write(*(b"%09d" % number for number in range(1000)))
        assert time.monotonic() - begin < 5
        assert log.num_lost == 990
        assert caplog.text.count("lines are lost") == 1
        disk.answers.set()
        until(lambda: b"lost" in path.read_bytes())
        log.write(b"after")
    assert path.read_bytes().splitlines() == [
        *(b"%09d" % number for number in range(10)),
        b"lost 990",
        b"after",
    ]


def test_a_line_that_is_larger_than_the_queue_is_lost_and_said(path: Path) -> None:
    with opened(path, max_queued_bytes=100) as log:
        log.write(b"x" * 200)
        until(lambda: path.read_bytes() == b"lost 1\n")
    assert log.num_lost == 1


def test_the_close_waits_for_a_disk_that_refuses_only_so_long(
    path: Path, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(path) as log:
        disk.num_free = 0
        log.write(b"one", b"two")
        begin = time.monotonic()
        assert log.log.close(0.2) == 2
        assert time.monotonic() - begin < 5
        assert "2 lines were not written to" in caplog.text


def test_the_close_waits_for_a_disk_that_does_not_answer_only_so_long(
    path: Path, disk: Disk
) -> None:
    with opened(path) as log:
        disk.answers.clear()
        log.write(b"one")
        begin = time.monotonic()
        assert log.log.close(0.2) == 1
        assert time.monotonic() - begin < 5
        disk.answers.set()


def test_what_comes_after_the_close_is_lost(path: Path) -> None:
    with opened(path) as log:
        log.log.close(1)
        log.write(b"late")
        assert log.num_lost == 1


def test_two_processes_cannot_have_one_file(path: Path) -> None:
    with opened(path), pytest.raises(RequestError, match="no other process"):
        Opened(LineLogConfig(path))


def test_a_fifo_or_a_folder_is_refused_at_once(path: Path, tmp_path: Path) -> None:
    os.mkfifo(path)
    for place in (path, tmp_path, tmp_path / "none" / "x"):
        with pytest.raises(RequestError, match="cannot be opened") as caught:
            Opened(LineLogConfig(place))
        assert caught.value.field == str(place)
