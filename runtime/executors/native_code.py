"""Loads native code from a sealed copy in memory, which cannot be truncated or modified.

    file -> bytes -> SHA-256 compared -> memfd, sealed -> dynamic loader

So the hashed bytes are the executed ones. Code that is mapped from a file gets SIGBUS if the file
is truncated, and changes if the file is written to.
"""

import ctypes
import fcntl
import hashlib
import os
import struct
import threading
from pathlib import Path

from trtc.protos.errors import EngineCorruptError, EnvironmentFault
from trtc.protos.files import UnreadableError, read_file
from trtc.runtime.integrity.engine_files import REBUILD

_MAX_BYTES = 256 << 20
"""Most bytes of a shared object; those of large models have a few MB."""
_ELF64_LITTLE_ENDIAN = b"\x7fELF\x02\x01"
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_NOEXEC_SEAL = 0x8
"""MFD_NOEXEC_SEAL of Linux 6.3: the copy can be mapped as code but not executed as a program. Some
systems (vm.memfd_noexec=2) require it."""

_loading = threading.Lock()
_loaded: dict[str, ctypes.CDLL] = {}
"""Loaded objects by SHA-256. Like the dynamic loader's table it is per process and entries are
never removed: an engine that is opened repeatedly uses memory once."""


def load_code(path: Path, sha256: str | None) -> ctypes.CDLL:
    """Load a shared object, or return the one that this process has loaded from the same bytes.

    Args:
        sha256: of its content; None: any content is accepted.

    Raises:
        EngineCorruptError: it cannot be read, is another file, or is truncated.
        EnvironmentFault: the system cannot load it.
    """
    try:
        content = read_file(path, _MAX_BYTES)
    except UnreadableError as error:
        raise EngineCorruptError(str(error), field=str(path), remedy=REBUILD) from error
    found = hashlib.sha256(content).hexdigest()
    if sha256 is not None and found != sha256:
        raise EngineCorruptError(
            "the content differs from the manifest's sha256", field=str(path), remedy=REBUILD
        )
    with _loading:
        if found not in _loaded:
            _check_segments(content, path)
            _loaded[found] = _load(content, path)
        return _loaded[found]


def _check_segments(content: bytes, path: Path) -> None:
    """Check that all segments are within the file: the loader does not check, and would crash.

    Raises:
        EngineCorruptError: a segment is not.
    """
    if not content.startswith(_ELF64_LITTLE_ENDIAN) or len(content) < _HEADER.size:
        return  # the loader refuses it with its own message
    fields = _HEADER.unpack_from(content)
    offset, size, count = fields[5], fields[9], fields[10]
    if size == _SEGMENT.size and offset + count * size <= len(content):
        table = content[offset : offset + count * size]
        if all(_end(segment) <= len(content) for segment in _SEGMENT.iter_unpack(table)):
            return
    raise EngineCorruptError(
        "is truncated: it names parts beyond its end", field=str(path), remedy=REBUILD
    )


def _end(segment: tuple[int, ...]) -> int:
    """End of a segment's bytes in the file."""
    return segment[2] + segment[5]


def _load(content: bytes, path: Path) -> ctypes.CDLL:
    try:
        descriptor = _sealed_copy(content, path.name)
        try:
            # Stays open: the loader identifies objects by name, and would mistake the next copy
            # with the same descriptor for this one.
            return ctypes.CDLL(f"/proc/self/fd/{descriptor}", mode=ctypes.RTLD_LOCAL)
        except OSError:
            os.close(descriptor)
            raise
    except OSError as error:
        raise EnvironmentFault(
            f"cannot be loaded ({error})",
            field=str(path),
            remedy="Build the engine on this machine",
        ) from error


def _sealed_copy(content: bytes, name: str) -> int:
    """A file in memory that can no longer be changed, not even by this process."""
    if not hasattr(os, "memfd_create"):
        raise EnvironmentFault(
            "runs compiled engines, as others have no memfd_create", field="Linux"
        )
    descriptor = _create(name)
    try:
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _create(name: str) -> int:
    try:
        return os.memfd_create(name, os.MFD_CLOEXEC | _NOEXEC_SEAL)
    except OSError:  # before Linux 6.3
        return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
