"""The kernels of paged_attention compile at the sizes of models without a GPU."""

import functools
from dataclasses import replace
from typing import Any

import pytest

from tests.support.attention_case import Sequence
from tests.support.attention_launches import KV_SCALES, make_call
from tests.support.compiled import compile_sources
from tests.support.triton_kernels import needs_triton
from trtc.builder.targets.gpu.nvrtc import compile_cuda
from trtc.builder.targets.gpu.ptx import CompiledKernel, find_entry
from trtc.builder.targets.gpu.triton import compile_kernel
from trtc.plugins.gpu.arch import ARCHS
from trtc.plugins.gpu.lowering import Launch, Site
from trtc.plugins.gpu.sources import CudaSource, KernelSource
from trtc.protos.errors import InvariantError, UnsupportedError
from trtc.protos.manifest import Limits

needs_triton()

from trtc.plugins.paged_attention import cuda_prefill_sm90  # noqa: E402
from trtc.plugins.paged_attention.cuda import lower  # noqa: E402
from trtc.plugins.paged_attention.triton import prefill  # noqa: E402

LLAMA_3 = {"heads": 32, "kv_heads": 8, "head_dim": 128}
CASES: dict[str, dict[str, Any]] = {
    "llama-3": LLAMA_3,
    "llama-3 fp8": {**LLAMA_3, "pool": "f8e4m3", "out": "f8e4m3", "by": KV_SCALES},
    "llama-3 int8": {**LLAMA_3, "pool": "i8"},
    "llama-3 int4": {**LLAMA_3, "pool": "u8"},
    "llama-3.2 int4": {**LLAMA_3, "head_dim": 64, "pool": "u8"},
    "phi-3 int4": {"heads": 32, "kv_heads": 32, "head_dim": 96, "pool": "u8", "page_size": 8},
    "gemma-2 int4": {"heads": 16, "kv_heads": 8, "head_dim": 256, "pool": "u8", "softcap": 50.0}
    | {"window": 4096, "page_size": 128},
    "llama-3.2": {**LLAMA_3, "head_dim": 64, "pool": "f8e4m3", "by": KV_SCALES},
    "phi-2": {"heads": 32, "kv_heads": 32, "head_dim": 80},
    "phi-3": {"heads": 32, "kv_heads": 32, "head_dim": 96, "window": 2047, "page_size": 8},
    "qwen2 awq": {"heads": 28, "kv_heads": 4, "head_dim": 128, "out": "i8"},
    "gemma-2": {"heads": 16, "kv_heads": 8, "head_dim": 256, "window": 4096, "softcap": 50.0}
    | {"page_size": 128},
    "gemma-2 fp8": {"heads": 16, "kv_heads": 8, "head_dim": 256, "pool": "f8e4m3", "by": KV_SCALES},
    "gpt-oss": {"heads": 64, "kv_heads": 8, "head_dim": 64, "window": 128, "sinks": True},
    "llama-4": {"heads": 40, "kv_heads": 8, "head_dim": 128, "window": 8192, "chunked": 1},
    "one kv head": {"heads": 32, "kv_heads": 1, "head_dim": 256, "out": "f32"},
}
GEMMA_4: dict[str, Any] = {"heads": 32, "kv_heads": 4, "head_dim": 512}
WIDE: dict[str, dict[str, Any]] = {
    "gemma-4": GEMMA_4,
    "gemma-4 fp8": {**GEMMA_4, "pool": "f8e4m3", "by": KV_SCALES},
}
ON_EVERY_SM = ("llama-3", "llama-3 int4", "gemma-2", "gemma-2 int4", "one kv head")
"""That differ in what they take of registers and of shared memory."""
IN_CUDA = [
    *[(name, 90) for name in CASES],
    *[(name, 89) for name, case in CASES.items() if case.get("pool") == "f8e4m3"],
    # sm_89 has the shared memory of sm_86, and no other instructions but those of E4M3.
    # As those of sm_100, and those of sm_86: `test_sms_of_the_same_shared_memory...`.
    *[(name, sm) for name in ON_EVERY_SM for sm in (80, 120)],
    *[("llama-3", sm) for sm in (86, 100)],
]
IN_TRITON = [
    ("gemma-2", 86),
    ("llama-3 fp8", 89),
    ("llama-3", 90),
    ("llama-3 int8", 90),
    *[("llama-3 int4", sm) for sm in ARCHS],
    *[("gemma-2 int4", sm) for sm in (86, 90, 120)],
    ("llama-4", 86),
    ("gpt-oss", 80),
    ("gpt-oss", 100),
    ("gemma-4", 80),
    ("gemma-4 fp8", 89),
    ("gemma-4", 90),
    ("gemma-4", 120),
]


def make_site(sm: int, batch: int = 256, **case: Any) -> Site:
    limits = Limits(max_batch_size=batch, max_seq_len=8192, max_num_tokens=8192)
    return replace(make_call([Sequence(1, 1)], **case).site(sm), limits=limits)


def compiled_once(launch: Launch, sm: int) -> CompiledKernel:
    (kernel,) = compile_sources([launch.kernel], sm)
    return kernel


def check(launch: Launch, kernel: CompiledKernel, sm: int) -> str:
    """What every launch promises; the PTX."""
    ptx = kernel.ptx.decode()
    assert kernel.cubin.startswith(b"\x7fELF")
    assert kernel.shared_bytes <= ARCHS[sm].shared_bytes
    _, declared, _ = find_entry(ptx, kernel.entry)
    assert len(declared) == len(launch.arguments) + len(launch.maps)
    assert launch.overlaps == (sm >= 90) == ("griddepcontrol.wait" in ptx)
    return ptx


@pytest.mark.parametrize(("name", "sm"), IN_CUDA)
def test_cuda_kernels_compile(name: str, sm: int) -> None:
    site = make_site(sm, **CASES[name])
    *decodes, every = lower(site)
    assert [one.kind for one in decodes] == ["decode"] * len(decodes)
    assert every.kind == "any"
    assert every.work[0] == decodes[0].work[0]
    cuda = [one for one in every.work if isinstance(one, Launch)]
    kernels = [one for one in cuda if isinstance(one.kernel, CudaSource)]
    assert len(kernels) == (
        3 if sm == 90 and site.axes["stored_width"] == site.axes["head_dim"] else 2
    )
    for launch in kernels:
        assert isinstance(launch.kernel, CudaSource)
        ptx = check(launch, compiled_once(launch, sm), sm)
        if launch.kernel.entry == "attention_split":
            assert "cp.async.cg.shared.global.L2::cache_hint.L2::128B" in ptx
            assert "mma.sync.aligned.m16n8k16" in ptx
        if launch.kernel.entry == "attention_prefill":
            assert "wgmma.mma_async" in ptx
            assert "cp.async.bulk.tensor.4d" in ptx


@pytest.mark.parametrize("name", ON_EVERY_SM)
def test_sms_of_the_same_shared_memory_have_the_same_cuda_kernels(name: str) -> None:
    for sm, arch in ARCHS.items():
        if arch.has_wgmma:
            continue
        found, like = (
            [
                one.kernel
                for one in lower(make_site(of, **CASES[name]))[0].work
                if isinstance(one, Launch)
            ]
            for of in (sm, 80 if arch.has_large_shared else 120)
        )
        assert found == like and [type(one) for one in found] == [CudaSource] * 2


@pytest.mark.parametrize(("batch", "stages"), [(256, 2), (2048, 1)])
def test_what_is_widened_has_fewer_stages_beside_many_sequences(batch: int, stages: int) -> None:
    site = make_site(90, batch=batch, **CASES["llama-3 fp8"])
    assert cuda_prefill_sm90.available(site)
    assert cuda_prefill_sm90.tile_of(site).raw_stages == stages
    launch = cuda_prefill_sm90.prefill(site)
    assert isinstance(launch.kernel, CudaSource)
    check(launch, compiled_once(launch, 90), 90)


@pytest.mark.parametrize("name", ["llama-3", "llama-3 fp8"])
def test_kernels_of_longer_splits_compile(name: str) -> None:
    _, *longer, _ = lower(make_site(90, **CASES[name]))
    assert [one.max_rows for one in longer] == [128, 256]
    for decode in longer:
        for launch in decode.work:
            assert isinstance(launch, Launch)
            assert isinstance(launch.kernel, CudaSource)
            check(launch, compiled_once(launch, 90), 90)


def test_e4m3_is_refused_where_there_is_none() -> None:
    decode, *_ = lower(make_site(80, **CASES["llama-3 fp8"]))
    for launch in decode.work:
        assert isinstance(launch, Launch)
        assert isinstance(launch.kernel, CudaSource)
        with pytest.raises(UnsupportedError, match="sm_80 has no E4M3"):
            compile_cuda(launch.kernel, 80)


def in_triton(name: str, sm: int) -> tuple[Launch, KernelSource]:
    launch = prefill(make_site(sm, **{**CASES, **WIDE}[name]), least_new=2)
    assert isinstance(launch.kernel, KernelSource)
    return launch, launch.kernel


@functools.cache
def compiled_tiles(sm: int) -> dict[str, CompiledKernel]:
    """Those of an SM, in one process."""
    names = [name for name, one in IN_TRITON if one == sm]
    sources = [in_triton(name, sm)[1] for name in names]
    return dict(zip(names, compile_sources(sources, sm), strict=True))


@pytest.mark.parametrize(("name", "sm"), IN_TRITON)
def test_tiles_compile_in_triton(name: str, sm: int) -> None:
    launch, _ = in_triton(name, sm)
    ptx = check(launch, compiled_tiles(sm)[name], sm)
    assert any(product in ptx for product in ("mma.sync", "wgmma", "tcgen05.mma"))
    assert ".local" not in ptx, "spills, or indexes registers"


def test_tiles_that_do_not_fit_are_refused() -> None:
    source = prefill(make_site(80, **LLAMA_3), least_new=2).kernel
    assert isinstance(source, KernelSource)
    with pytest.raises(InvariantError, match=r"\d+ of 49152 of shared memory"):
        compile_kernel(replace(source, max_shared_bytes=48 << 10), 80)


@pytest.mark.parametrize(
    "case",
    [
        {"head_dim": 72},  # of no model
        {**CASES["gemma-2 fp8"], "batch": 4096},  # no room to count so many sequences' tiles
    ],
)
def test_what_sm_90_cannot_hold_goes_through_triton(case: dict[str, Any]) -> None:
    last = lower(make_site(90, **case))[-1].work[-1]
    assert isinstance(last, Launch)
    assert isinstance(last.kernel, KernelSource)


@pytest.mark.parametrize("batch", [1, 200, 1000])
def test_shared_memory_has_room_for_any_batch(batch: int) -> None:
    """Its size is a multiple of its alignment, whatever the sequences' part of it is."""
    launch = lower(make_site(90, batch, **LLAMA_3))[-1].work[-1]
    assert isinstance(launch, Launch) and isinstance(launch.kernel, CudaSource)
    assert launch.kernel.entry == "attention_prefill"
    check(launch, compiled_once(launch, 90), 90)
