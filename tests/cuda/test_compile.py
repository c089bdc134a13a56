"""Operators' kernels at the sizes of models compile without a GPU, as the launches promise."""

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.compiled import compile_sources, one_of_each
from tests.support.triton_kernels import needs_triton
from trtc.builder.targets.cuda_lowering import _KernelTable
from trtc.builder.targets.gpu.ptx import CompiledKernel
from trtc.builder.targets.gpu.triton import compile_kernel
from trtc.plugins.gpu.arch import ARCHS, Arch
from trtc.plugins.gpu.lowering import Launch, Lower, Site
from trtc.plugins.kv_pool import code_width
from trtc.protos.errors import UnsupportedError
from trtc.protos.manifest import Limits

needs_triton()

from trtc.plugins.add import cuda as add  # noqa: E402
from trtc.plugins.embedding import cuda as embedding  # noqa: E402
from trtc.plugins.gather_rows import cuda as gather_rows  # noqa: E402
from trtc.plugins.quantize import cuda as quantize  # noqa: E402
from trtc.plugins.rms_norm import cuda as rms_norm  # noqa: E402
from trtc.plugins.rope_kv_write import cuda as rope_kv_write  # noqa: E402
from trtc.plugins.swiglu import cuda as swiglu  # noqa: E402

K, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 4096, 14336, 32, 8, 128  # Llama-3.1-8B
ROPE = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "rotary_dim": HEAD_DIM}


def site(sm: int, dtypes: dict[str, str], axes: dict[str, int], **attributes: Any) -> Site:
    width = next(iter(axes.values()))
    return Site(
        dtypes=dtypes,
        strides=dict.fromkeys(dtypes, width),
        axes=axes,
        attributes=attributes,
        rows="tokens",
        page_size=16,
        limits=Limits(max_batch_size=256, max_seq_len=8192, max_num_tokens=8192),
        sm=sm,
    )


def rope_site(sm: int, pool: str) -> Site:
    stored = code_width(pool, HEAD_DIM) + (4 if pool == "u8" else 0)
    steps = {"positions": "i32", "slots": "i32", "cos": "f32", "sin": "f32"}
    scales = {"k_scale": "f32", "v_scale": "f32"} if pool == "f8e4m3" else {}
    activations = dict.fromkeys(("q", "k", "v", "q_out"), "bf16")
    dtypes = activations | steps | scales | {"pool": pool, "pool_out": pool}
    return site(sm, dtypes, {"q": 6144, "stored_width": stored}, **ROPE, eps=0.0, norm_after=0)


NORM = {"x": "bf16", "residual": "bf16", "weight": "f32", "total": "bf16"}
QUANTISED = {"out_scale": "f32", "out": "f8e4m3"}
TURNED = {"out": "i8", "row_scale": "f32"}
BLOCKS = {"hadamard": 64}
CASES: dict[str, tuple[Lower, Any]] = {
    "embedding": (
        embedding.lower,
        lambda sm: site(
            sm,
            {"token_ids": "i32", "table": "bf16", "out": "bf16"},
            {"H": K, "V": 9},
            weight_dtype="bf16",
            scale=1.0,
            group_size=0,
            layout="row_major",
        ),
    ),
    "embedding-i8": (
        embedding.lower,
        lambda sm: site(
            sm,
            {"token_ids": "i32", "table": "i8", "table_scale": "f32", "out": "bf16"},
            {"H": K, "V": 9},
            weight_dtype="i8",
            scale=1.0,
            group_size=128,
            layout="row_major",
        ),
    ),
    "embedding-iq4": (
        embedding.lower,
        lambda sm: site(
            sm,
            {
                "token_ids": "i32",
                "table": "u4",
                "table_scale": "u8",
                "scale_unit": "f32",
                "out": "bf16",
            },
            {"H": K, "V": 32},
            weight_dtype="iq4",
            scale=1.0,
            group_size=32,
            layout="tiles",
        ),
    ),
    "rms_norm-e4m3": (
        rms_norm.lower,
        lambda sm: site(sm, NORM | QUANTISED, {"K": K}, eps=1e-5, centered=0, hadamard=0),
    ),
    "rms_norm-wide": (
        rms_norm.lower,
        lambda sm: site(
            sm,
            NORM | {"out_scale": "f32", "out": "i8"},
            {"K": 16384},
            eps=1e-5,
            centered=0,
            hadamard=0,
        ),
    ),
    "rms_norm-hadamard": (
        rms_norm.lower,
        lambda sm: site(sm, NORM | TURNED, {"K": K, "scales": 1}, eps=1e-5, centered=0, **BLOCKS),
    ),
    "rope_kv_write": (rope_kv_write.lower, lambda sm: rope_site(sm, "bf16")),
    "rope_kv_write-int4": (rope_kv_write.lower, lambda sm: rope_site(sm, "u8")),
    "rope_kv_write-e4m3": (rope_kv_write.lower, lambda sm: rope_site(sm, "f8e4m3")),
    "swiglu": (
        swiglu.lower,
        lambda sm: site(
            sm,
            dict.fromkeys(("gate", "up", "out"), "bf16"),
            {"I": INTERMEDIATE},
            activation="gelu_tanh",
        ),
    ),
    "swiglu-e4m3": (
        swiglu.lower,
        lambda sm: site(
            sm, {"gate": "bf16", "up": "bf16"} | QUANTISED, {"I": INTERMEDIATE}, activation="silu"
        ),
    ),
    "swiglu-hadamard": (
        swiglu.lower,
        lambda sm: site(
            sm,
            {"gate": "bf16", "up": "bf16"} | TURNED,
            {"I": INTERMEDIATE, "scales": 1},
            activation="silu",
            **BLOCKS,
        ),
    ),
    "quantize-e4m3": (
        quantize.lower,
        lambda sm: site(sm, {"x": "bf16", "pre_scale": "f32"} | QUANTISED, {"K": K}, codes="none"),
    ),
    "gather_rows": (
        gather_rows.lower,
        lambda sm: site(sm, {"x": "bf16", "rows": "i32", "out": "bf16"}, {"K": K}),
    ),
    "add": (
        add.lower,
        lambda sm: site(sm, dict.fromkeys(("x", "y", "out"), "bf16"), {"K": K}),
    ),
}


def facts(arch: Arch) -> tuple[bool, bool]:
    """All that these kernels, which multiply no matrices, ask the table for."""
    return arch.has_e4m3, arch.has_pdl


SMS = one_of_each(facts)


def launches_of(name: str, sm: int) -> list[Launch]:
    lower, make = CASES[name]
    variants = lower(make(sm))
    assert variants[-1].kind == "any"
    assert variants[-1].max_rows == 8192
    work = [one for variant in variants for one in variant.work]
    launches = [one for one in work if isinstance(one, Launch)]
    assert len(launches) == len(work)
    return launches


def is_refused(name: str, sm: int) -> bool:
    return name.endswith("e4m3") and not ARCHS[sm].has_e4m3


@functools.cache
def compiled(sm: int) -> dict[str, Sequence[CompiledKernel]]:
    """Every case's kernels, in one process."""
    sources = {
        name: [launch.kernel for launch in launches_of(name, sm)]
        for name in CASES
        if not is_refused(name, sm)
    }
    kernels = iter(compile_sources([one for some in sources.values() for one in some], sm))
    return {name: [next(kernels) for _ in some] for name, some in sources.items()}


@pytest.mark.parametrize("name", CASES)
def test_the_same_facts_give_the_same_kernels(name: str) -> None:
    for arch in ARCHS.values():
        (like,) = [sm for sm in SMS if facts(ARCHS[sm]) == facts(arch)]
        found, wanted = (launches_of(name, sm) for sm in (arch.sm, like))
        assert [one.kernel for one in found] == [one.kernel for one in wanted]


@pytest.mark.parametrize("sm", SMS)
@pytest.mark.parametrize("name", CASES)
def test_kernels_compile(name: str, sm: int) -> None:
    launches = launches_of(name, sm)
    if is_refused(name, sm):
        for launch in launches:
            with pytest.raises(UnsupportedError, match=f"sm_{sm} has no E4M3"):
                compile_kernel(launch.kernel, sm)  # type: ignore[arg-type]
        return
    for launch, kernel in zip(launches, compiled(sm)[name], strict=True):
        assert len(launch.arguments) == len(launch.kernel.parameters)
        ptx = kernel.ptx.decode()
        entry = re.search(r"\.visible \.entry \w+\((.*?)\n\)", ptx, re.DOTALL)
        assert entry is not None
        assert entry[1].count(".param") == len(launch.arguments)
        assert kernel.cubin.startswith(b"\x7fELF")
        assert ".local" not in ptx, "spills, or indexes registers"
        # A row of codes is a few hundred bytes.
        is_short = name == "embedding-iq4"
        assert is_short or "ld.global.v4.b32" in ptx, "no loads of 16 bytes"
        assert launch.overlaps == (sm >= 90)
        assert ("griddepcontrol" in ptx) == launch.overlaps
        if launch.overlaps:
            assert_every_program_waits(ptx)


def test_a_build_writes_what_its_compilers_give(tmp_path: Path) -> None:
    """Each kernel once, in order of first use, though two are compiled at a time."""
    launches = [launches_of(name, 90)[0] for name in ("add", "gather_rows", "add", "swiglu")]
    table = _KernelTable(90)
    assert [table.add(launch).kernel for launch in launches] == [0, 1, 0, 2]
    codes = table.write(tmp_path, lambda step: None)
    names = ("add", "gather_rows", "swiglu")
    for name, code in zip(names, codes, strict=True):
        kernel = compiled(90)[name][0]
        assert (code.entry, code.num_threads) == (kernel.entry, kernel.num_threads)
        assert (tmp_path / code.file).read_bytes() == kernel.cubin


def assert_every_program_waits(ptx: str) -> None:
    """For the kernel before, ahead of any branch: the kernel after the next one relies on it."""
    body = ptx[ptx.index("{", ptx.index(".entry")) :]
    before = body[: body.index("griddepcontrol.wait")]
    assert not re.search(r"\b(bra|ret|st\.global)\b", before)
    assert "griddepcontrol.launch_dependents" in before
