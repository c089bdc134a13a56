"""The CUDA target's refusals, which come before any kernel is compiled."""

from importlib import metadata
from typing import Any

import numpy as np
import pytest

from tests.support.engines import config_dict
from tests.support.evaluate import LIMITS
from trtc.builder.checkpoint.dummy import dummy_checkpoint
from trtc.builder.families.registry import decoder_spec
from trtc.builder.recipes import Apply, Concat, Constant
from trtc.builder.targets import cuda
from trtc.builder.targets.cuda import CudaTarget, parse_cuda_target
from trtc.builder.targets.registry import parse_target
from trtc.builder.transforms import ScalePerRow
from trtc.protos.errors import EnvironmentFault, UnsupportedError
from trtc.quant.scheme import SCHEMES


@pytest.fixture
def compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton and NVRTC are optional packages; these refusals do not depend on them."""
    monkeypatch.setattr(cuda, "check_triton", lambda extra: None)
    monkeypatch.setattr(cuda, "check_nvrtc", lambda: None)


def test_names() -> None:
    assert parse_target("cuda:sm_90").name == "cuda:sm_90"
    for wrong in ("", "sm_75", "90"):
        with pytest.raises(UnsupportedError, match="--target"):
            parse_cuda_target(wrong)


@pytest.mark.parametrize(
    ("target", "extra"),
    [
        ("cuda:sm_90", "cuda-build"),
        ("tensorrt:sm_90", "tensorrt-build"),
        ("tensorrt-rtx:sm_89", "tensorrt-build"),
    ],
)
@pytest.mark.parametrize("found", [None, "3.5.0"])
def test_without_triton_the_remedy_is_the_extra_of_the_target(
    target: str, extra: str, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name != "triton":
            return installed(name)
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return found

    installed = metadata.version
    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(EnvironmentFault, match=found or "has none") as caught:
        parse_target(target).check(SCHEMES["bf16"])
    assert caught.value.remedy == f"pip install 'trtc[{extra}]'"


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


@pytest.mark.parametrize(
    ("scales", "uniform"),
    [
        ((2.0,), True),
        ((2.0, 2.0, 2.0), True),
        ((2.0, 2.5), False),
        (([2.0, 3.0, 2.0, 2.0],), False),
    ],
)
def test_merged_weights_have_one_scale_where_calibration_gave_them_one(
    scales: tuple[Any, ...], uniform: bool
) -> None:
    reader, _ = dummy_checkpoint(
        decoder_spec(config_dict("llama"), LIMITS.max_seq_len), SCHEMES["bf16"]
    )
    parts = tuple(
        Apply(ScalePerRow(4), (Constant(np.asarray(scale, np.float32)),)) for scale in scales
    )
    whole = parts[0] if len(parts) == 1 else Concat(parts)
    assert cuda._is_uniform(whole, reader) == uniform
    assert not cuda._is_uniform(parts[0].sources[0], reader)
