"""The SM of a GPU, asked of a driver: a stub with two devices stands in for NVIDIA's."""

import ctypes
import subprocess
from pathlib import Path

import pytest

from trtc.builder.targets.cxx import find_compiler
from trtc.plugins.gpu import probe as gpu

DRIVER = """
static const int sms[2][2] = {{9, 0}, {12, 1}};
extern "C" int cuInit(unsigned flags) { return flags != 0; }
extern "C" int cuDeviceGet(int *device, int ordinal) {
  if (ordinal < 0 || ordinal > 1) return 101;  // CUDA_ERROR_INVALID_DEVICE
  *device = ordinal + 40;  // a handle, not an index
  return 0;
}
extern "C" int cuDeviceGetAttribute(int *value, int attribute, int device) {
  *value = sms[device - 40][attribute == 76];
  return attribute != 75 && attribute != 76;
}
"""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, library = tmp_path / "driver.cpp", tmp_path / "libcuda.so.1"
    source.write_text(DRIVER)
    command = [*find_compiler().command, "-shared", "-fPIC", "-o", str(library), str(source)]
    subprocess.run(command, check=True)
    load = ctypes.CDLL
    monkeypatch.setattr(ctypes, "CDLL", lambda name: load(str(tmp_path / name)))


@pytest.mark.usefixtures("driver")
def test_the_driver_says_the_sm_of_each_device() -> None:
    assert [gpu.device_sm(), gpu.device_sm(1), gpu.device_sm(2)] == [90, 121, None]


def test_without_a_driver_there_is_no_sm(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> ctypes.CDLL:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert gpu.device_sm() is None
