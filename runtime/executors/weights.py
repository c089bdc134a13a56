"""An engine's weights on the host: mapped from their file, read from it, or random."""

import io
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trtc.protos.errors import EngineCorruptError
from trtc.protos.files import UnreadableError, open_regular
from trtc.protos.plan import read_plan
from trtc.runtime.executors.huge_pages import advise_huge_pages
from trtc.runtime.integrity.engine_files import REBUILD, FileIdentity, changed_while_opening

_ALIGNMENT = 64


class KeptWeights(NamedTuple):
    """Weights in host memory of an engine that is closed temporarily. They were verified when it
    was opened."""

    data: NDArray[np.uint8]
    digest: str
    """Digest of the engine's manifest."""
    mapped: FileIdentity | None
    """The file that `data` is mapped from; None: `data` is memory of this process."""

    def are_of(self, digest: str, found: FileIdentity | None) -> bool:
        """Whether an engine can be opened with them: it is the same engine, and a mapped file has
        not been written to.

        Args:
            digest: digest of its manifest.
            found: identity of its weights' file now; None: it has none.
        """
        return self.digest == digest and (self.mapped is None or self.mapped == found)


def map_weights(path: Path, num_bytes: int, found: FileIdentity | None = None) -> NDArray[np.uint8]:
    """The data section of weights.safetensors, mapped and not copied.

    Args:
        found: identity of the file that is hashed; the same file must be mapped.

    Raises:
        EngineCorruptError: it cannot be read, is another file than `found`, or its data section is
            not `num_bytes` long or not aligned.
    """
    with _opened(path) as file:
        begin = _begin_of_data(path, file, num_bytes, found)
        if num_bytes == 0:
            return np.empty(0, np.uint8)
        mapping = mmap.mmap(file.fileno(), begin + num_bytes, access=mmap.ACCESS_READ)
    advise_huge_pages(mapping)
    return np.frombuffer(mapping, np.uint8, offset=begin)


class WeightsFile:
    """The data section of weights.safetensors, for copying: it is read and not mapped, so that
    truncation of the file is an error instead of SIGBUS. Thread-safe. Close it."""

    def __init__(self, path: Path, num_bytes: int, found: FileIdentity | None = None) -> None:
        """See `map_weights`."""
        with _opened(path) as file:
            self._begin = _begin_of_data(path, file, num_bytes, found)
            self._path = path
            self._descriptor = os.dup(file.fileno())
        self._num_bytes = num_bytes

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def read(self, begin: int, target: NDArray[np.uint8]) -> None:
        """Fill `target` with bytes of the section from `begin` on. Releases the GIL.

        Raises:
            EngineCorruptError: the file was truncated, or is no longer readable.
        """
        rest: memoryview = target.data
        while rest:
            at = self._begin + begin + len(target) - len(rest)
            try:
                count = os.preadv(self._descriptor, [rest], at)
            except OSError as error:
                raise self._damaged(f"cannot be read any more ({error.strerror})") from error
            if count == 0:
                raise self._damaged("was truncated while it was read")
            rest = rest[count:]

    def close(self) -> None:
        os.close(self._descriptor)

    def _damaged(self, problem: str) -> EngineCorruptError:
        return EngineCorruptError(problem, field=str(self._path), remedy=REBUILD)


@contextmanager
def _opened(path: Path) -> Iterator[io.FileIO]:
    try:
        with open_regular(path) as file:
            yield file
    except UnreadableError as error:
        raise EngineCorruptError(str(error), field=str(path), remedy=REBUILD) from error
    except (OSError, ValueError) as error:
        raise EngineCorruptError(
            f"cannot be read ({error})", field=str(path), remedy=REBUILD
        ) from error


def _begin_of_data(path: Path, file: io.FileIO, num_bytes: int, found: FileIdentity | None) -> int:
    status = os.fstat(file.fileno())
    begin = 8 + int.from_bytes(os.pread(file.fileno(), 8, 0), "little")
    if found is not None and FileIdentity.of(status) != found:
        raise changed_while_opening(path)
    length = status.st_size - begin
    if begin % _ALIGNMENT or length != num_bytes:
        raise EngineCorruptError(
            f"the data section is {length} bytes at {begin}, not "
            f"{num_bytes} at a multiple of {_ALIGNMENT}",
            field=str(path),
            remedy=REBUILD,
        )
    return begin


def dummy_weights(plan_path: Path) -> NDArray[np.uint8]:
    """Random weights for a plan that was built without any."""
    from trtc.runtime.executors.dummy_weights import (
        fill_weights,  # numpy.random takes 10 ms to import
    )

    plan = read_plan(plan_path)
    return fill_weights(plan.weights, plan.weights_bytes)
