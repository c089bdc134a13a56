"""protos/files.py: whatever lies at a path, reading ends, and within bounds."""

import os
from pathlib import Path

import msgspec
import pytest

from trtc.protos.files import UnreadableError, decode_json, open_regular, read_file, read_json


class Point(msgspec.Struct):
    x: int


def test_a_regular_file_is_read_whole_and_through_links(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b'{"x": 3}')
    (tmp_path / "link").symlink_to("file")
    assert read_file(tmp_path / "link", 8) == b'{"x": 3}'
    assert read_json(tmp_path / "file", Point) == Point(3)
    (tmp_path / "empty").touch()
    assert read_file(tmp_path / "empty", 0) == b""


@pytest.mark.parametrize("kind", ["fifo", "link to a fifo", "device", "directory", "null device"])
def test_anything_else_is_refused_without_waiting(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "path"
    if kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "directory":
        path.mkdir()
    elif kind == "null device":
        path.symlink_to("/dev/null")
    else:
        os.mkfifo(tmp_path / "fifo")
        path.symlink_to("fifo")
    with pytest.raises(UnreadableError, match="not a regular file"):
        read_file(path if kind != "fifo" else tmp_path / "fifo", 100)


def test_what_is_missing_or_no_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnreadableError, match="No such file"):
        open_regular(tmp_path / "none")
    with pytest.raises(UnreadableError, match="null"):
        open_regular(tmp_path / "a\0b")


def test_no_more_than_the_bound_is_read(tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(UnreadableError, match="more than the 1000"):
        read_file(tmp_path / "sparse", 1000)
    # The kernel gives the size of this file as 0.
    with pytest.raises(UnreadableError, match="more than the 10"):
        read_file(Path("/proc/self/maps"), 10)
    assert read_file(Path("/proc/self/stat"), 10_000)


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff", b'{"x": "1"}', b"[" * 10**6, b'{"x":' * 10**6, b'{"y":' + b"[" * 10**6, b"{"],
)
def test_malformed_json_is_one_error(content: bytes) -> None:
    with pytest.raises(UnreadableError):
        decode_json(content, Point)
