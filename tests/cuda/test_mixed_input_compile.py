"""Kernels of narrow linears compile for every SM, and take what they declare."""

from collections.abc import Mapping

import pytest

from tests.support.compiled import LIMITS, PAGE_SIZE, compiled, one_of_each, together
from tests.support.triton_kernels import needs_triton
from trtc.plugins.gpu.arch import ARCHS
from trtc.plugins.gpu.lowering import Launch, Site, Variant
from trtc.plugins.gpu.sources import CudaSource

needs_triton()

from trtc.plugins.gemm import mixed_input  # noqa: E402
from trtc.plugins.gemm.mixed_input_tactics import Weight, few_tactics, shared_bytes  # noqa: E402

WEIGHTS: Mapping[str, Mapping[str, str]] = {
    "i4": {"weight": "i4", "weight_scale": "f32"},
    "iq4": {"weight": "u4", "weight_scale": "u8", "scale_unit": "f32"},
    "mxfp4": {"weight": "f4e2m1", "weight_scale": "u8"},
    "nvfp4": {"weight": "f4e2m1", "weight_scale": "u8", "scale_unit": "f32"},
    "i6": {"weight": "u8", "weight_scale": "f32"},
}
"""By weight type, or by format of E2M1."""


def linear_site(sm: int, columns: int, depth: int, weight: str, group_size: int) -> Site:
    return Site(
        dtypes={"x": "bf16", **WEIGHTS[weight], "out": "bf16"},
        strides={"x": depth, "out": columns},
        axes={"N": columns, "K": depth},
        attributes={
            "N": columns,
            "group_size": group_size,
            "weight_dtype": "f4e2m1" if weight.endswith("fp4") else weight,
            "layout": "split"
            if weight == "i6"
            else "tiles"
            if group_size >= 32 and depth % 128 == 0
            else "row_major",
            "activation": "exact",
            "softcap": 0.0,
            "out_dtype": "bf16",
        },
        rows="tokens",
        page_size=PAGE_SIZE,
        limits=LIMITS,
        sm=sm,
    )


def is_cuda(variant: Variant) -> bool:
    (launch, *_) = variant.work
    return isinstance(launch, Launch) and isinstance(launch.kernel, CudaSource)


SMS = one_of_each(lambda arch: (arch.has_large_shared, arch.has_pdl, arch.has_wgmma))


@pytest.mark.parametrize(
    ("weight", "group", "sm"),
    [
        *(("i4", 128, sm) for sm in SMS),
        # The same kernels with other words: for WGMMA, and for each generation of SMs once.
        *(("iq4", 32, sm) for sm in (90, 100)),
        *(("i6", 128, sm) for sm in (90, 120)),
        *(("mxfp4", 32, sm) for sm in (90, 120)),
        *(("nvfp4", 16, sm) for sm in (80, 90)),
        ("iq4", 16, 90),
    ],
)
def test_mixed_input_gemms_compile(weight: str, group: int, sm: int) -> None:
    """The smallest and the largest numbers of rows of each kernel."""
    variants = mixed_input.lower_mixed_input(linear_site(sm, 16384, 4096, weight, group))
    few = [variant for variant in variants if is_cuda(variant)]
    assert bool(few) == (group >= 32)
    more = variants[len(few) : -1]
    for kernel in compiled(together([*few[:1], *few[-1:], *more[-1:], variants[-1]]), sm):
        assert kernel.entry == "widen_weight" or b"mma" in kernel.ptx


def test_many_columns_in_rows_and_small_groups_compile_for_wgmma() -> None:
    variants = mixed_input.lower_mixed_input(linear_site(90, 28672, 4128, "i4", 32))
    (kernel,) = compiled(variants[1], 90)
    assert b"wgmma" in kernel.ptx and variants[1].max_rows == 64


@pytest.mark.parametrize("sm", ARCHS)
@pytest.mark.parametrize(("bits", "has_zero"), [(4, False), (4, True), (6, False), (8, False)])
@pytest.mark.parametrize(
    ("columns", "depth"), [(16, 128), (1152, 896), (6144, 4096), (57344, 8192), (8192, 28672)]
)
def test_tactics_fit(sm: int, columns: int, depth: int, bits: int, has_zero: bool) -> None:
    weight = Weight(columns, depth, 128, bits, has_zero)
    tactics = list(few_tactics(sm, weight))
    assert [few.rows for few in tactics] == sorted(few.rows for few in tactics)
    assert tactics[0].rows == 1
    for few in tactics:
        assert shared_bytes(few, weight) <= ARCHS[sm].shared_bytes
        assert few.block_rows <= columns
        assert few.num_threads <= 1024
        assert few.cluster == 1 or sm >= 90
