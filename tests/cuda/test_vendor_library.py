"""NVIDIA's libraries beside the driver, where they are missing."""

import pytest

from trtc.protos.errors import EnvironmentFault
from trtc.runtime.executors.cuda.vendor_library import load_vendor_library

pathfinder = pytest.importorskip(
    "cuda.pathfinder", reason="make test-cuda installs it", exc_type=ImportError
)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> None:
        raise pathfinder.DynamicLibNotFoundError(f"no file for {name}\nsearched here\nand there")

    monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", find)
    with pytest.raises(EnvironmentFault, match="no file for cublasLt") as caught:
        load_vendor_library("cublasLt")
    assert caught.value.field == "libcublasLt"
    assert "searched" not in str(caught.value)
    assert "trtc[cuda]" in caught.value.remedy
