"""Kernels compile for every SM without a GPU, and take exactly the parameters that they declare."""

import functools
import re
from dataclasses import replace
from typing import Any

import pytest

from tests.support.compiled import compile_once
from tests.support.triton_kernels import needs_triton
from trtc.builder.targets.gpu.ptx import CompiledKernel, assemble, strip_hidden_parameters
from trtc.builder.targets.gpu.triton import compile_kernel, compile_kernels_in
from trtc.builder.targets.gpu.triton_process import TritonProcess
from trtc.plugins.gpu.arch import ARCHS, DEFAULT_SHARED_BYTES, parse_sm
from trtc.protos.errors import InvariantError, UnsupportedError

needs_triton()

from trtc.plugins.attention.split_kv import TENSORRT  # noqa: E402
from trtc.plugins.attention.tensorrt_tiles import DECODE, PREFILL  # noqa: E402
from trtc.plugins.attention_combine import tensorrt_kernel as attention_combine  # noqa: E402
from trtc.plugins.attention_split import tensorrt_kernel as attention_split  # noqa: E402
from trtc.plugins.kv_write import tensorrt_kernel as kv_write  # noqa: E402
from trtc.plugins.paged_attention import tensorrt_kernel as paged_attention  # noqa: E402

_PLAIN = ("bf16", 128, PREFILL)
_SMALL_HEADS, _LARGE_HEADS = ("bf16", 64, PREFILL), ("bf16", 256, PREFILL)
_DECODE = ("bf16", 128, DECODE)
_E4M3_DECODE, _E4M3_LARGE_HEADS = ("f8e4m3", 128, DECODE), ("f8e4m3", 256, PREFILL)
_IN_BLOCKS_OF_128 = [("bf16", head_dim, PREFILL) for head_dim in (80, 96)]
"""As heads of 128 are: the kernels mask what they load."""

CASES: dict[int, list[tuple[str, int, int]]] = {
    80: [_PLAIN, _SMALL_HEADS, _LARGE_HEADS, _DECODE, *_IN_BLOCKS_OF_128, _E4M3_DECODE],
    86: [_PLAIN],
    89: [_PLAIN, _E4M3_DECODE, _E4M3_LARGE_HEADS],
    90: [_PLAIN, _SMALL_HEADS, _LARGE_HEADS, _DECODE, _E4M3_DECODE, _E4M3_LARGE_HEADS],
    100: [_PLAIN, _LARGE_HEADS, _E4M3_DECODE],
    120: [_PLAIN, _SMALL_HEADS, _DECODE, _E4M3_LARGE_HEADS],
}
"""By SM. sm_86 has the code of sm_80, and sm_89 that of E4M3 beside it
(`test_sms_of_one_generation_have_the_same_code`); sm_100 and sm_120 divide the others' cases."""
SPLIT_CASES = {
    80: [_DECODE, _LARGE_HEADS],
    86: [_DECODE],
    89: [_DECODE, _E4M3_DECODE],
    90: [_DECODE, _E4M3_DECODE, _E4M3_LARGE_HEADS],
    100: [_E4M3_DECODE],
    120: [_E4M3_LARGE_HEADS],
}


ATTENTION = {
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
    "scale": 0.1,
    "window": 0,
    "chunked": 0,
    "softcap": 0.0,
}


def attention_source(pool: str, head_dim: int, tactic: int, **more: Any) -> Any:
    attributes = {**ATTENTION, "head_dim": head_dim, "scale": head_dim**-0.5, **more}
    return paged_attention.kernel({"q": "bf16", "pool": pool}, attributes, 16, tactic)


def split_source(pool: str, head_dim: int, tactic: int) -> Any:
    attributes = {**ATTENTION, "head_dim": head_dim, "splits": TENSORRT.max_splits}
    return attention_split.kernel({"q": "bf16", "pool": pool}, attributes, 16, tactic)


def combine_source(tactic: int) -> Any:
    attributes = {
        **{name: ATTENTION[name] for name in ("num_heads", "head_dim", "window", "chunked")},
        "splits": TENSORRT.max_splits,
    }
    return attention_combine.kernel({"rows": "bf16"}, attributes, 16, tactic)


def write_source(sm: int) -> Any:
    pool = "f8e4m3" if ARCHS[sm].has_e4m3 else "bf16"
    attributes = {"num_kv_heads": 8, "head_dim": 128}
    return kv_write.kernel({"k": "bf16", "pool": pool}, attributes, 16)


@functools.cache
def compiled(sm: int) -> dict[tuple[Any, ...], CompiledKernel]:
    """Every kernel for an SM by its operator and case."""
    pools = [case for case in CASES[sm] if ARCHS[sm].has_e4m3 or case[0] != "f8e4m3"]
    sources: dict[tuple[Any, ...], Any] = {
        **{("paged_attention", *case): attention_source(*case) for case in pools},
        **{("attention_split", *case): split_source(*case) for case in SPLIT_CASES[sm]},
        **{("attention_combine", tactic): combine_source(tactic) for tactic in (DECODE, PREFILL)},
        ("kv_write",): write_source(sm),
    }
    return dict(zip(sources, compile_once(list(sources.values()), sm), strict=True))


@pytest.mark.parametrize(
    ("pool", "head_dim", "tactic", "sm"), [(*case, sm) for sm in ARCHS for case in CASES[sm]]
)
def test_paged_attention_compiles(pool: str, head_dim: int, tactic: int, sm: int) -> None:
    if not ARCHS[sm].has_e4m3 and pool == "f8e4m3":
        with pytest.raises(UnsupportedError, match=f"sm_{sm} has no E4M3"):
            compile_kernel(attention_source(pool, head_dim, tactic), sm)
        return
    kernel = compiled(sm)["paged_attention", pool, head_dim, tactic]
    assert kernel.cubin.startswith(b"\x7fELF")
    assert kernel.ptx_target.removesuffix("a") == f"sm_{sm}"
    assert kernel.shared_bytes <= DEFAULT_SHARED_BYTES
    assert entry_parameters(kernel.ptx.decode()) == 10
    assert re.search(r"\b(mma\.sync|wgmma|tcgen05\.mma)", kernel.ptx.decode()), "no tensor cores"


@pytest.mark.parametrize(
    ("pool", "head_dim", "tactic", "sm"),
    [(*case, sm) for sm in ARCHS for case in SPLIT_CASES[sm]],
)
def test_attention_split_compiles(pool: str, head_dim: int, tactic: int, sm: int) -> None:
    kernel = compiled(sm)["attention_split", pool, head_dim, tactic]
    assert kernel.shared_bytes <= DEFAULT_SHARED_BYTES
    assert entry_parameters(kernel.ptx.decode()) == 12
    assert re.search(r"\b(mma\.sync|wgmma|tcgen05\.mma)", kernel.ptx.decode()), "no tensor cores"


@pytest.mark.parametrize("sm", [86, 89])
def test_sms_of_one_generation_have_the_same_code(sm: int) -> None:
    for key in (("paged_attention", *_PLAIN), ("attention_split", *_DECODE)):
        like, found = compiled(80)[key].ptx.decode(), compiled(sm)[key].ptx.decode()
        assert found == like.replace(".target sm_80", f".target sm_{sm}")


@pytest.mark.parametrize("sm", ARCHS)
@pytest.mark.parametrize("tactic", [DECODE, PREFILL])
def test_attention_combine_compiles(sm: int, tactic: int) -> None:
    kernel = compiled(sm)["attention_combine", tactic]
    assert kernel.ptx_target.removesuffix("a") == f"sm_{sm}"
    assert kernel.shared_bytes <= DEFAULT_SHARED_BYTES
    assert entry_parameters(kernel.ptx.decode()) == 7
    assert b".local" not in kernel.ptx, "a split row's splits stay in registers"


@pytest.mark.parametrize("sm", ARCHS)
def test_kv_write_compiles(sm: int) -> None:
    kernel = compiled(sm)["kv_write",]
    assert entry_parameters(kernel.ptx.decode()) == 7
    assert b"div.rn.f32" in kernel.ptx


def test_the_same_source_gives_the_same_bytes_and_no_paths() -> None:
    attributes = {"num_kv_heads": 2, "head_dim": 32}
    source = kv_write.kernel({"k": "bf16", "pool": "bf16"}, attributes, 16)
    first, second = compile_kernel(source, 90), compile_kernel(source, 90)
    assert (first.ptx, first.cubin) == (second.ptx, second.cubin)
    assert b".file" not in first.ptx
    assert b"cuda.py" not in first.cubin


def test_the_order_of_sms_does_not_show() -> None:
    """Triton keeps conversions of the first SM of a process: each compilation gets a fork."""
    source = attention_source("f8e4m3", 64, DECODE)
    with TritonProcess() as triton:
        compile_kernels_in(triton, (source,), 90)
        (after,) = compile_kernels_in(triton, (source,), 89)
    assert after == compile_kernel(source, 89)


def test_a_process_goes_on_after_a_kernel_that_triton_refuses() -> None:
    source = kv_write.kernel({"k": "bf16", "pool": "bf16"}, {"num_kv_heads": 2, "head_dim": 32}, 16)
    with TritonProcess() as triton:
        for warps in (3, 5):
            with pytest.raises(InvariantError, match=r"kv_write: Triton refuses.*power of 2"):
                compile_kernels_in(triton, (replace(source, num_warps=warps),), 90)
        (kernel,) = compile_kernels_in(triton, (source,), 90)
        assert triton._process is not None
        triton._process.kill()
        triton._process.wait()
        with pytest.raises(InvariantError, match="no reason given"):
            compile_kernels_in(triton, (source,), 90)
    assert kernel.cubin.startswith(b"\x7fELF")


def test_a_kernel_that_reads_a_hidden_parameter_is_refused() -> None:
    ptx = (
        ".version 8.7\n.target sm_90a\n.visible .entry f(\n\t.param .u64 f_param_0,\n"
        "\t.param .u64 f_param_1,\n\t.param .u64 f_param_2\n)\n{\n%s\n\tret;\n}\n"
    )
    stripped = strip_hidden_parameters(ptx % "", "f", 1)
    assert entry_parameters(stripped) == 1
    with pytest.raises(InvariantError, match="hidden"):
        strip_hidden_parameters(ptx % "\tld.param.u64 %rd1, [f_param_2];", "f", 1)
    with pytest.raises(InvariantError, match="3 parameters"):
        strip_hidden_parameters(ptx % "", "f", 2)


def test_ptxas_errors_are_said() -> None:
    with pytest.raises(InvariantError, match="ptxas refuses"):
        assemble(".version 8.7\n.target sm_90a\nnonsense\n", 90)


def test_unknown_sms_are_refused() -> None:
    assert parse_sm("sm_90") == 90
    with pytest.raises(UnsupportedError, match="sm_80, sm_86, sm_89"):
        parse_sm("sm_70")


def entry_parameters(ptx: str) -> int:
    match = re.search(r"\.visible \.entry \w+\((.*?)\n\)", ptx, re.DOTALL)
    assert match is not None
    return match[1].count(".param")
