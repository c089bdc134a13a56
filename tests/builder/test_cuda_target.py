"""The CUDA target's refusals, which come before any kernel is compiled."""

import pytest

from trtc.builder.targets import cuda
from trtc.builder.targets.cuda import CudaTarget, parse_cuda_target
from trtc.builder.targets.registry import parse_target
from trtc.protos.errors import EnvironmentFault, UnsupportedError
from trtc.quant.scheme import SCHEMES


@pytest.fixture
def compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton and NVRTC live in an environment of their own; here they are taken for granted."""
    monkeypatch.setattr(cuda, "check_triton", lambda: None)
    monkeypatch.setattr(cuda, "check_nvrtc", lambda: None)


def test_names() -> None:
    assert parse_target("cuda:sm_90").name == "cuda:sm_90"
    for wrong in ("", "sm_75", "90"):
        with pytest.raises(UnsupportedError, match="--target"):
            parse_cuda_target(wrong)


def test_without_the_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise EnvironmentFault("none here", field="triton", remedy="pip install")

    monkeypatch.setattr(cuda, "check_triton", missing)
    with pytest.raises(EnvironmentFault, match="triton"):
        CudaTarget(90).check(SCHEMES["bf16"])


@pytest.mark.parametrize("scheme", ["fp32", "bf16", "fp8", "int8_sq", "int4_awq", "w4a8_awq"])
def test_schemes_with_kernels(scheme: str, compilers: None) -> None:
    CudaTarget(90).check(SCHEMES[scheme])


def test_schemes_without_kernels_are_refused_by_name(compilers: None) -> None:
    with pytest.raises(UnsupportedError, match="FP4") as caught:
        CudaTarget(90).check(SCHEMES["nvfp4"])
    assert caught.value.field == "--dtype"


def test_an_sm_without_e4m3(compilers: None) -> None:
    with pytest.raises(UnsupportedError, match="sm_80 has no E4M3"):
        CudaTarget(80).check(SCHEMES["fp8"])
    CudaTarget(80).check(SCHEMES["bf16"])
