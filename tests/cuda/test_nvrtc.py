"""CUDA C++ compiles for every SM without a GPU, and what a launch could not bear is refused."""

import sys
import time
import types
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

from trtc.builder.targets.gpu import nvrtc
from trtc.plugins.gpu.arch import ARCHS
from trtc.plugins.gpu.sources import CudaSource, KernelParameter
from trtc.protos.errors import EnvironmentFault, InvariantError, UnsupportedError

KERNEL = """
#include "shared/twice.cuh"
extern "C" __global__ void __launch_bounds__(64) scale(float* out, const float* x) {
  extern __shared__ float kept[];
  kept[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = twice(kept[63 - threadIdx.x]) * static_cast<float>(BY);
}
extern "C" __global__ void spills(float* out, const int* at) {
  float values[64];
  for (int i = 0; i < 64; ++i) values[at[i]] = out[i];
  for (int i = 0; i < 64; ++i) out[i] = values[at[64 + i]];
}
"""
TWICE = """
#pragma once
__device__ float twice(float value) { return 2 * value; }
"""
SOURCE = CudaSource(
    file="shared/scale.cu",
    entry="scale",
    parameters=(KernelParameter("out", "f32"), KernelParameter("x", "f32")),
    constants={"BY": 1.5},
    num_threads=64,
    shared_bytes=256,
)


@pytest.fixture(autouse=True)
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A plugins folder with one kernel."""
    pytest.importorskip("cuda.bindings", reason="make test-cuda installs it")
    folder = tmp_path / "shared"
    folder.mkdir()
    (folder / "scale.cu").write_text(KERNEL.split('extern "C" __global__ void spills')[0])
    (folder / "spills.cu").write_text(KERNEL)
    (folder / "twice.cuh").write_text(TWICE)
    monkeypatch.setattr(nvrtc, "_PLUGINS", tmp_path)
    return tmp_path


@pytest.mark.parametrize("sm", ARCHS)
def test_a_kernel_compiles_for_every_sm(sm: int) -> None:
    kernel = nvrtc.compile_cuda(SOURCE, sm)
    assert kernel.cubin.startswith(b"\x7fELF")
    assert kernel.ptx_target == ARCHS[sm].cubin_target
    assert (kernel.num_threads, kernel.shared_bytes, kernel.sm) == (64, 256, sm)
    assert kernel.ptx.startswith(b"//")
    assert b".visible .entry scale(" in kernel.ptx


def test_the_same_source_gives_the_same_bytes_and_no_paths(kernels: Path) -> None:
    first, second = nvrtc.compile_cuda(SOURCE, 90), nvrtc.compile_cuda(SOURCE, 90)
    assert (first.ptx, first.cubin) == (second.ptx, second.cubin)
    assert str(kernels).encode() not in first.ptx + first.cubin
    other = nvrtc.compile_cuda(replace(SOURCE, constants={"BY": 2.5}), 90)
    assert other.cubin != first.cubin


@pytest.mark.gpu
def test_a_second_compilation_is_checked_too() -> None:
    """Where there is a driver, NVRTC has a cache on disk."""
    source = replace(SOURCE, constants={"BY": time.time()})
    for _ in range(2):
        assert nvrtc.compile_cuda(source, 90).cubin
        with pytest.raises(InvariantError, match=r"local memory: .*256"):
            nvrtc.compile_cuda(replace(source, file="shared/spills.cu"), 90)


def test_a_kernel_that_nvrtc_refuses_says_why() -> None:
    with pytest.raises(InvariantError, match=r"scale\.cu.*\bBY\b"):
        nvrtc.compile_cuda(replace(SOURCE, constants={}), 90)


def test_local_memory_is_refused() -> None:
    with pytest.raises(InvariantError, match=r"local memory: .*256"):
        nvrtc.compile_cuda(replace(SOURCE, file="shared/spills.cu"), 90)


def test_a_wrong_number_of_parameters_is_refused() -> None:
    source = replace(SOURCE, parameters=SOURCE.parameters[:1])
    with pytest.raises(InvariantError, match="takes 2 parameters, not 1"):
        nvrtc.compile_cuda(source, 90)


def test_an_unknown_entry_is_refused() -> None:
    with pytest.raises(InvariantError, match="no entry"):
        nvrtc.compile_cuda(replace(SOURCE, entry="other"), 90)


@pytest.mark.parametrize("sm", ARCHS)
def test_more_shared_memory_than_a_block_may_have_is_refused(sm: int) -> None:
    most = ARCHS[sm].shared_bytes
    assert nvrtc.compile_cuda(replace(SOURCE, shared_bytes=most), sm).shared_bytes == most
    with pytest.raises(InvariantError, match="shared memory"):
        nvrtc.compile_cuda(replace(SOURCE, shared_bytes=most + 16), sm)


def test_e4m3_is_refused_where_there_is_none() -> None:
    parameters = (KernelParameter("out", "f32"), KernelParameter("x", "f8e4m3"))
    with pytest.raises(UnsupportedError, match="sm_80 has no E4M3"):
        nvrtc.compile_cuda(replace(SOURCE, parameters=parameters), 80)


@pytest.mark.parametrize("missing", ["cuda-bindings", "nvidia-cuda-nvrtc"])
def test_missing_wheels_are_named(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = metadata.version

    def version(name: str) -> str:
        if name == missing:
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(EnvironmentFault, match=rf"no {missing}.*trtc\[cuda-build\]"):
        nvrtc.compile_cuda(SOURCE, 90)


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "13.5.37")
    with pytest.raises(EnvironmentFault, match=r"nvidia-cuda-nvrtc 13\.0, .* 13\.5\.37"):
        nvrtc.check_nvrtc()


def test_a_library_that_cannot_be_loaded_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wheel is there, and its files are where nobody looks for them."""

    class Broken(types.ModuleType):
        def nvrtcVersion(self) -> None:
            raise RuntimeError("Failure finding libnvrtc.so.13\nNo such file")

    bindings = types.ModuleType("cuda.bindings")
    monkeypatch.setattr(bindings, "nvrtc", Broken("cuda.bindings.nvrtc"), raising=False)
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.setattr(metadata, "version", lambda name: "13.0.88")
    with pytest.raises(EnvironmentFault, match=r"cannot be loaded \(RuntimeError\)") as caught:
        nvrtc.check_nvrtc()
    assert "\n" not in str(caught.value)
