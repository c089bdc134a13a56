"""Code is loaded from a sealed copy in memory: what was hashed is what runs."""

import ctypes
import fcntl
import hashlib
import os
from pathlib import Path

import pytest

from tests.support.shared_objects import compile_shared_object
from trtc.protos.errors import EngineCorruptError, EnvironmentFault
from trtc.runtime.executors.native_code import load_code


def library(folder: Path, answer: int) -> Path:
    """A shared object whose `answer()` is that number."""
    source = f'extern "C" int answer() {{ return {answer}; }}'
    path = folder / f"{answer}.so"
    path.write_bytes(
        compile_shared_object(source, ("-shared", "-fPIC", "-std=c++20"), ()).read_bytes()
    )
    return path


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def descriptor_of(code: ctypes.CDLL) -> int:
    return int(code._name.rpartition("/")[2])


def test_each_content_is_loaded_once(tmp_path: Path) -> None:
    first, second = library(tmp_path, 41), library(tmp_path, 42)
    before = load_code(first, digest(first))
    again = tmp_path / "copy.so"
    again.write_bytes(first.read_bytes())
    assert load_code(again, None) is before
    assert load_code(second, None).answer() == 42
    assert before.answer() == 41


def test_a_path_with_other_content_is_other_code(tmp_path: Path) -> None:
    path = library(tmp_path, 43)
    before = load_code(path, None)
    path.write_bytes(library(tmp_path, 44).read_bytes())
    assert load_code(path, None).answer() == 44
    assert before.answer() == 43


def test_the_copy_is_sealed(tmp_path: Path) -> None:
    descriptor = descriptor_of(load_code(library(tmp_path, 45), None))
    seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    for seal in (fcntl.F_SEAL_WRITE, fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW, fcntl.F_SEAL_SEAL):
        assert seals & seal
    with pytest.raises(PermissionError):
        os.pwrite(descriptor, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 0)
    assert not os.get_inheritable(descriptor)


def test_kernels_before_the_seal_of_execution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = os.memfd_create

    def old(name: str, flags: int) -> int:
        if flags & ~(os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING):
            raise OSError(22, "Invalid argument")
        return create(name, flags)

    monkeypatch.setattr(os, "memfd_create", old)
    code = load_code(library(tmp_path, 46), None)
    assert code.answer() == 46
    assert fcntl.fcntl(descriptor_of(code), fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE


def test_a_system_without_memfd_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(EnvironmentFault, match="memfd_create"):
        load_code(library(tmp_path, 47), None)


def test_other_content_than_the_manifest_lists_is_refused(tmp_path: Path) -> None:
    path = library(tmp_path, 48)
    with pytest.raises(EngineCorruptError, match="sha256") as caught:
        load_code(path, "0" * 64)
    assert caught.value.field == str(path)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_truncated_object_is_refused_before_the_loader_crashes(
    share: float, tmp_path: Path
) -> None:
    path = library(tmp_path, 49)
    content = path.read_bytes()
    loaded_end = _end_of_segments(content)
    path.write_bytes(content[: int(loaded_end * share)])
    with pytest.raises(EngineCorruptError, match="truncated") as caught:
        load_code(path, None)
    assert caught.value.field == str(path)


def _end_of_segments(content: bytes) -> int:
    table, count = int.from_bytes(content[32:40], "little"), content[56]
    entries = [content[table + 56 * i : table + 56 * (i + 1)] for i in range(count)]
    words = [[int.from_bytes(e[8 * k : 8 * k + 8], "little") for k in range(7)] for e in entries]
    return max(word[1] + word[4] for word in words)


@pytest.mark.parametrize("kind", ["missing", "fifo", "directory"])
def test_what_is_no_regular_file_is_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "engine.so"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    with pytest.raises(EngineCorruptError, match="cannot be read"):
        load_code(path, None)


def test_what_is_no_object_leaves_nothing_open(tmp_path: Path) -> None:
    path = tmp_path / "engine.so"
    path.write_bytes(b"not an object")
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(EnvironmentFault, match="cannot be loaded"):
        load_code(path, None)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
