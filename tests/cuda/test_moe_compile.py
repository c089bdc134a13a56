"""Kernels of routed experts compile for every SM, and take what they declare."""

import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from tests.support.compiled import (
    LIMITS,
    PAGE_SIZE,
    compile_sources,
    compiled,
    one_of_each,
    together,
)
from tests.support.triton_kernels import needs_triton
from trtc.plugins.gpu.lowering import Launch, Site
from trtc.plugins.gpu.sources import CudaSource
from trtc.plugins.moe.op import MOE

needs_triton()

from trtc.plugins.moe import cuda as moe  # noqa: E402


def moe_site(sm: int, weight: str, quant: str = "none", group: int = 0) -> Site:
    """4-bit weights are in tiles, or in rows where their groups are of another size than 128, as
    those of E2M1, whose scales have units."""
    group = group or (128 if weight == "i4" else 0)
    names = ["gate_up_scale", "down_scale"] if weight != "bf16" else []
    names += ["gate_up_input_scale", "down_input_scale"] if quant != "none" else []
    bytes_of = dict.fromkeys(names, "u8") if weight == "f4e2m1" else {}
    names += [f"{name}_unit" for name in bytes_of]
    return Site(
        dtypes={
            "x": "bf16",
            "router_logits": "f32",
            **dict.fromkeys(("gate_up", "down"), {"iq4": "u4", "i6": "u8"}.get(weight, weight)),
            "out": "bf16",
            **dict.fromkeys(names, "f32"),
            **bytes_of,
        },
        strides={"x": 2048, "router_logits": 128, "out": 2048},
        axes={"E": 128, "L": 128, "H": 2048, "I": 768},
        attributes=MOE.complete_attributes(
            {
                "I": 768,
                "top_k": 8,
                "renormalize": 1,
                "activation": "silu",
                "group_size": group,
                "weight_dtype": weight,
                "layout": {"i4": "tiles", "i6": "split"}.get(weight, "row_major")
                if group == 128
                else "row_major",
                "act_quant": quant,
                "out_dtype": "bf16",
            }
        ),
        rows="tokens",
        page_size=PAGE_SIZE,
        limits=LIMITS,
        sm=sm,
    )


SMS = one_of_each(lambda arch: (arch.has_large_shared, arch.has_pdl, arch.has_wgmma))
OF_WORDS = (86, 90, 100, 120)
"""The same kernels with words of other types, once a generation of SMs; sm_86 has the blocks of
sm_80, and less shared memory. test_every_arch.py has smaller ones for every SM."""
PRODUCTS = ("gate_up", "down")


@pytest.mark.slow
@pytest.mark.parametrize("sm", SMS)
def test_experts_compile(sm: int) -> None:
    """4-bit weights, which take the most shared memory, in the largest blocks."""
    (variant,) = moe.lower(moe_site(sm, "i4"))[-1:]
    entries = [kernel.entry for kernel in compiled(variant, sm)]
    assert entries == ["route", "gather", "gate_up", "down", "combine"]


@pytest.mark.parametrize(
    ("weight", "group"), [("i4", 32), ("iq4", 16), ("f4e2m1", 16), ("i6", 128)]
)
def test_experts_in_groups_compile_for_wgmma(weight: str, group: int) -> None:
    (variant,) = moe.lower(moe_site(90, weight, group=group))[-1:]
    _, down = compiled(variant, 90, PRODUCTS)
    assert "wgmma" in down.ptx.decode()


@pytest.mark.parametrize(("weight", "quant"), [("bf16", "none"), ("f8e4m3", "f8e4m3")])
def test_experts_of_other_weights_compile(weight: str, quant: str) -> None:
    for variant in moe.lower(moe_site(90, weight, quant))[:1]:
        for kernel in compiled(variant, 90):
            assert kernel.entry not in PRODUCTS or b"mma" in kernel.ptx


def gpt_oss_site(sm: int) -> Site:
    """Of gpt-oss-20b, whose sizes are no multiples of 128."""
    weights = dict.fromkeys(("gate_up", "down"), "f4e2m1")
    scales = dict.fromkeys(("gate_up_scale", "down_scale"), "u8")
    biases = dict.fromkeys(("gate_up_bias", "down_bias"), "f32")
    return Site(
        dtypes={"x": "bf16", "router_logits": "f32", "out": "bf16"} | weights | scales | biases,
        strides={"x": 2880, "router_logits": 32, "out": 2880},
        axes={"E": 32, "L": 32, "H": 2880, "I": 2880},
        attributes=MOE.complete_attributes(
            {
                "I": 2880,
                "top_k": 4,
                "renormalize": 1,
                "activation": "quick_gelu",
                "limit": 7.0,
                "up_offset": 1.0,
                "group_size": 32,
                "weight_dtype": "f4e2m1",
                "out_dtype": "bf16",
            }
        ),
        rows="tokens",
        page_size=PAGE_SIZE,
        limits=LIMITS,
        sm=sm,
    )


@pytest.mark.parametrize("sm", OF_WORDS)
def test_experts_of_e2m1_in_units_compile(sm: int) -> None:
    """The smallest and the largest blocks, and those between for WGMMA."""
    variants = moe.lower(moe_site(sm, "f4e2m1", group=16))
    wanted = together(variants if sm == 90 else (variants[0], variants[-1]))
    for kernel in compiled(wanted, sm, PRODUCTS):
        assert b"mma" in kernel.ptx


@pytest.mark.parametrize("sm", [sm for sm in OF_WORDS if sm != 100])
def test_experts_of_e2m1_compile(sm: int) -> None:
    """By Triton, but on sm_90."""
    variants = moe.lower(gpt_oss_site(sm))
    entries = (f"experts_e2m1{kind}" for kind in ("", "_tiles", "_wide")) if sm == 90 else PRODUCTS
    kernels = list(compiled(together(variants if sm == 90 else variants[-1:]), sm, tuple(entries)))
    assert len(kernels) == 2 * (len(variants) if sm == 90 else 1)
    for kernel in kernels:
        assert b"mma" in kernel.ptx


def test_what_kernels_of_e2m1_read_before_they_wait_is_complete() -> None:
    """The launch before lets them start when its own wait is over: only what it writes itself is
    not there. They store nothing before they wait."""
    early = set()
    for variant in moe.lower(gpt_oss_site(90)):
        launches = [one for one in variant.work if isinstance(one, Launch)]
        for before, launch in pairwise(launches):
            if not isinstance(launch.kernel, CudaSource):
                continue
            (kernel,) = compile_sources([launch.kernel], 90)
            ahead, *after = kernel.ptx.decode().split("griddepcontrol.wait")
            assert after and not re.search(r"\b(st|red|atom)\.global", ahead)
            if "ld.global" in ahead:
                early.add(kernel.entry)
                assert before.kernel.constants.get("RELEASES_LATE") == 1
    assert early == {"experts_e2m1", "experts_e2m1_tiles", "operand_e2m1"}


def latent_site(weight: str, group: int, experts: int, top_k: int, width: int) -> Site:
    """Of the released checkpoints of DeepSeek-V3 and Kimi-K2-Thinking: scales of groups, a sigmoid
    router with a bias, a shared expert."""
    like = moe_site(90, weight)
    extra = dict.fromkeys(("choice_bias",), "f32") | {"shared": "bf16"}
    groups = {"num_groups": 8, "top_groups": 4} if experts == 256 else {}
    changed: dict[str, Any] = {
        "top_k": top_k,
        "score": "sigmoid",
        "epsilon": 1e-20,
        "scale": 2.5,
        "group_size": group,
        "I": width,
    }
    return replace(
        like,
        dtypes={**like.dtypes, **extra},
        strides={"x": 7168, "router_logits": experts, "out": 7168, "shared": 7168},
        axes={"E": experts, "L": experts, "H": 7168, "I": width},
        attributes={**like.attributes, **changed, **groups},
    )


@pytest.mark.parametrize(
    "case",
    [("f8e4m3", 128, 256, 8, 2048), ("i4", 32, 384, 8, 2048)],
    ids=["DeepSeek-V3", "Kimi-K2-Thinking"],
)
def test_experts_of_latent_models_compile(case: tuple[str, int, int, int, int]) -> None:
    first, *_, last = moe.lower(latent_site(*case))
    for variant, entries in ((first, ()), (last, PRODUCTS)):
        for kernel in compiled(variant, 90, entries):
            assert kernel.entry not in PRODUCTS or b"mma" in kernel.ptx
