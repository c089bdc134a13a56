"""Huge pages are asked for, and a system without them is no reason to stop."""

import mmap
from pathlib import Path

import numpy as np
import pytest

from tests.support.smaps import THP, mapping_entry
from trtc.runtime.executors.huge_pages import advise_huge_pages
from trtc.runtime.executors.weights import map_weights


@pytest.mark.skipif(not THP.exists(), reason="this kernel has no huge pages")
def test_weights_ask_for_huge_pages(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    data = np.arange(5000, dtype=np.uint32).view(np.uint8)
    path.write_bytes((56).to_bytes(8, "little") + b" " * 56 + data.tobytes())
    weights = map_weights(path, len(data))
    np.testing.assert_array_equal(weights, data)
    flags = mapping_entry(weights.ctypes.data).split("VmFlags:")[1].split()
    assert "hg" in flags


def test_a_kernel_without_them_is_left_alone() -> None:
    class Refusing(mmap.mmap):
        def madvise(self, *args: int) -> None:
            raise OSError(22, "Invalid argument")

    with Refusing(-1, mmap.PAGESIZE) as memory:
        advise_huge_pages(memory)
        memory[:3] = b"abc"
        assert memory[:3] == b"abc"
