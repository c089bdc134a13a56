"""The same kernels on a GPU: fresh inputs, overlaps, and the sampler over thousands of rows."""

import secrets
from dataclasses import replace

import numpy as np
import pytest
from msgspec.structs import replace as with_fields

from tests.support import scan_calls, ssm_calls
from tests.support.attention_case import Sequence
from tests.support.attention_launches import assert_close as assert_attention_close
from tests.support.attention_launches import make_call, run_variant
from tests.support.delta_calls import (
    LARGE,
    LARGE_BY_CHANNEL,
    LARGE_OF_LONG_CHUNKS,
    LARGE_WRITTEN_TWICE,
    Deltas,
)
from tests.support.device_sampling import sample_by_stages
from tests.support.elementwise import grid, into_rows, rms_scale, sliced, turned
from tests.support.index_calls import IndexShape
from tests.support.index_calls import step_of as index_step_of
from tests.support.index_calls import write_call as index_write_call
from tests.support.kernels import KernelCall, assert_close
from tests.support.latent_calls import (
    PUBLISHED,
    expanded_call,
    expanding,
    head_linear_call,
    step_of,
    write_call,
)
from tests.support.linear_calls import Case as Linear
from tests.support.linear_calls import linear_call, take_rows
from tests.support.lowered import run_lowered, site_of
from tests.support.masks import drawn_masks
from tests.support.moe_calls import GATELESS, GPT_OSS, ROUTERS, moe_call, with_experts
from tests.support.moe_calls import Case as Experts
from tests.support.operands import random_array, scalar
from tests.support.rope_calls import assert_rope_close
from tests.support.rope_calls import grid as rope_grid
from tests.support.sampling_oracle import (
    Case,
    Float32s,
    counts_of,
    distribution,
    edited,
    is_borderline,
    is_likely,
    with_last_pending,
)
from tests.support.state_calls import LONG
from tests.support.triton_kernels import Work, launches_of, needs_triton
from trtc.plugins.gemm.cuda import lower_gemm
from trtc.plugins.gemm.mixed_input import lower_mixed_input
from trtc.plugins.gpu.lowering import DIMS, Launch, Site
from trtc.plugins.gpu.sources import KernelSource
from trtc.plugins.moe.cuda import lower as lower_moe
from trtc.plugins.registry import REGISTRY
from trtc.plugins.rounding import NUMPY_DTYPES
from trtc.protos.sampling import SamplingParams
from trtc.runtime.executors.cuda.device import Place
from trtc.runtime.sampling.pending import with_pending_counted
from trtc.runtime.sampling.philox import uniforms
from trtc.runtime.sampling.sampler import SamplingBatch, sample

needs_triton()

from tests.support.gpu_kernels import Gpu  # noqa: E402
from trtc.builder.targets.gpu.lowerings import lowerings  # noqa: E402

pytestmark = pytest.mark.gpu

HIDDEN, INTERMEDIATE = 4096, 14336  # Llama-3.1-8B


@pytest.fixture(scope="module")
def gpu() -> Gpu:
    return Gpu.open()


@pytest.fixture
def rng() -> np.random.Generator:
    seed = secrets.randbits(32)
    print(f"seed {seed}")  # noqa: T201 (shown when the test fails)
    return np.random.default_rng(seed)


def large_calls(rng: np.random.Generator, rows: int) -> list[KernelCall]:
    scale = {"out_scale": scalar(0.02)}
    x, residual = (random_array(rng, rows, HIDDEN, dtype="bf16", spread=2) for _ in range(2))
    fused = random_array(rng, rows, 2 * INTERMEDIATE, dtype="bf16", spread=2)
    gated = {"gate": fused[:, :INTERMEDIATE], "up": fused[:, INTERMEDIATE:]}
    norm = {"x": x, "residual": residual, "weight": random_array(rng, HIDDEN)}
    silu = {"activation": "silu"}
    return [
        KernelCall(
            REGISTRY["rms_norm"], {"eps": 1e-5, "out_dtype": "f8e4m3"}, norm | scale, ("total",)
        ),
        KernelCall(
            REGISTRY["rms_norm"], {"eps": 1e-5, "out_dtype": "f8e4m3"}, norm | scale, ("normed",)
        ),
        KernelCall(REGISTRY["rms_norm"], {"eps": 1e-5, "out_dtype": "bf16"}, norm, ("total",)),
        KernelCall(REGISTRY["swiglu"], {**silu, "out_dtype": "f8e4m3"}, gated | scale),
        KernelCall(REGISTRY["swiglu"], {**silu, "out_dtype": "bf16"}, gated),
        KernelCall(REGISTRY["quantize"], {"out_dtype": "f8e4m3"}, {"x": x} | scale),
        KernelCall(REGISTRY["add"], {}, {"x": x, "y": residual}),
        rms_scale(rng, "bf16", HIDDEN, rows),
        *(
            turned(
                into_rows(
                    KernelCall(REGISTRY[op], {**settings, "out_dtype": code}, inputs), scales
                ),
                block,
            )
            for op, settings, inputs, depth in (
                ("rms_norm", {"eps": 1e-5}, norm, HIDDEN),
                ("swiglu", silu, gated, INTERMEDIATE),
                ("quantize", {}, {"x": x}, HIDDEN),
            )
            for code, scales, block in (
                ("f8e4m3", 1, 0),
                ("f8e4m3", depth // 128, 0),
                ("i8", 1, 64),
            )
        ),
    ]


def test_kernels_agree_with_references(gpu: Gpu) -> None:
    for run in (gpu.run, gpu.run_apart):
        for call in grid():
            assert_close(call, run_lowered(call, run=run, sm=gpu.sm))
        for call in rope_grid():
            answers = [run_lowered(call, run=run, sm=gpu.sm, variant=at) for at in (0, 1)]
            assert_rope_close(call, answers[0])
            for name, answer in answers[0].items():
                assert answer.tobytes() == answers[1][name].tobytes(), "depends on the bucket"


@pytest.mark.parametrize("shape", LARGE, ids=lambda shape: shape[0])
def test_delta_nets_of_a_real_size(gpu: Gpu, shape: tuple[str, int, int, int, int, int]) -> None:
    """A row at a time and in chunks; prompts, decodes, drafts and states that are kept."""
    assert_steps_agree(gpu, Deltas(*shape))


@pytest.mark.parametrize("alike", [False, True])
def test_delta_nets_in_long_chunks(gpu: Gpu, alike: bool) -> None:
    """As delta nets."""
    assert_steps_agree(gpu, Deltas(*LARGE_OF_LONG_CHUNKS, lengths=LONG, alike=alike))


@pytest.mark.parametrize("shape", LARGE_BY_CHANNEL, ids=lambda shape: shape[0])
def test_delta_nets_by_channel_of_a_real_size(
    gpu: Gpu, shape: tuple[str, int, int, int, int, int]
) -> None:
    """As delta nets."""
    assert_steps_agree(gpu, Deltas(*shape, by_channel=True))


@pytest.mark.parametrize(
    ("shape", "alike"),
    [
        *((shape, False) for shape in LARGE_WRITTEN_TWICE),
        # In bf16 what is left of keys alike is as small as the roundings of their products.
        *((shape, True) for shape in LARGE_WRITTEN_TWICE if shape[0] == "f32"),
    ],
    ids=str,
)
def test_delta_nets_with_negative_eigenvalues_of_a_real_size(
    gpu: Gpu, shape: tuple[str, int, int, int, int, int], alike: bool
) -> None:
    """As delta nets."""
    assert_steps_agree(gpu, Deltas(*shape, write_scale=2.0, alike=alike))


@pytest.mark.parametrize("shape", ssm_calls.LARGE, ids=lambda shape: f"{shape[0]}-{shape[4]}")
def test_recurrences_of_a_real_size(gpu: Gpu, shape: ssm_calls.Shape) -> None:
    """As delta nets."""
    assert_steps_agree(gpu, ssm_calls.Recurrences(*shape))


@pytest.mark.parametrize("shape", ssm_calls.LARGE, ids=lambda shape: f"{shape[0]}-{shape[4]}")
def test_recurrences_of_a_rank_leave_out_the_norm(gpu: Gpu, shape: ssm_calls.Shape) -> None:
    case = ssm_calls.Recurrences(*shape)
    before = case.call(case.history()).reference()["state_out"]
    for variant, parts in ((0, case.decode()), (1, case.step())):
        call = ssm_calls.without_norm(case.call(parts, before))
        found, expected = (
            run_lowered(call, run=gpu.run, sm=gpu.sm, variant=variant),
            call.reference(),
        )
        tolerance = call.op.tolerances[shape[0]]
        squares = expected["squares"]
        np.testing.assert_allclose(found["squares"], squares, rtol=2 * tolerance.relative)
        # As large as they are with their norm, which the operator's tolerance is for.
        width = expected["out"].shape[1] // squares.shape[1]
        root = np.repeat(np.sqrt(squares / width), width, axis=1)
        actual, reference = (one["out"].astype(np.float32) / root for one in (found, expected))
        np.testing.assert_allclose(actual, reference, tolerance.relative, tolerance.absolute)


@pytest.mark.parametrize("shape", scan_calls.LARGE, ids=lambda shape: f"{shape[0]}-{shape[1]}")
def test_scans_of_a_real_size(gpu: Gpu, shape: scan_calls.Shape) -> None:
    """As delta nets."""
    assert_steps_agree(gpu, scan_calls.Scans(*shape))


def assert_steps_agree(gpu: Gpu, case: Deltas | ssm_calls.Recurrences | scan_calls.Scans) -> None:
    before = case.call(case.history()).reference()["state_out"]
    decodes = (
        case.call(case.decode(), before),
        case.kept_call(case.decode(), before),
        case.drafted_call(before, as_sequences=True),
    )
    steps = (case.call(case.step(), before), case.kept_call(case.step(), before))
    variants = lowerings()[case.op](site_of(decodes[0], "tokens", gpu.sm))
    for run in (gpu.run, gpu.run_apart):
        for number, variant in enumerate(variants):
            for call in decodes if variant.kind == "decode" else (*decodes, *steps):
                found = run_lowered(call, run=run, sm=gpu.sm, variant=number)
                expected = call.reference()
                assert_close(call, {"out": found["out"], "state_out": expected["state_out"]})
                within = 2e-2 if case.dtype == "bf16" else 1e-4
                np.testing.assert_allclose(
                    found["state_out"], expected["state_out"], rtol=within, atol=within
                )


@pytest.mark.parametrize("rows", [1, 17, 700])
def test_rows_of_a_real_size(gpu: Gpu, rng: np.random.Generator, rows: int) -> None:
    for call in large_calls(rng, rows):
        whole = run_lowered(call, run=gpu.run, sm=gpu.sm, stale=5)
        assert_close(call, whole)
        last = run_lowered(sliced(call, slice(rows - 1, rows)), run=gpu.run, sm=gpu.sm)
        for name, part in last.items():
            assert part.tobytes() == whole[name][-1:].tobytes(), "depends on the other rows"


@pytest.mark.parametrize(
    "case",
    [
        Linear("bf16", "i4", HIDDEN, INTERMEDIATE, 128, layout="tiles", out="f32"),
        Linear("bf16", "i4", HIDDEN, INTERMEDIATE, 16, layout="row_major", out="f32"),
        Linear("bf16", "iq4", HIDDEN, INTERMEDIATE, 32, layout="tiles", bytes=True, out="f32"),
        Linear("bf16", "iq4", HIDDEN, INTERMEDIATE, 16, layout="row_major", bytes=True, out="f32"),
        Linear("bf16", "f4e2m1", HIDDEN, INTERMEDIATE, 32, layout="tiles", powers=True, out="f32"),
        Linear(
            "bf16", "f4e2m1", HIDDEN, INTERMEDIATE, 16, layout="row_major", bytes=True, out="f32"
        ),
        Linear("bf16", "i6", HIDDEN, INTERMEDIATE, 128, layout="split", out="f32"),
        Linear("f32", "i6", 256, 128, 128, layout="split", out="f32"),
    ],
    ids=str,
)
def test_narrow_linears_of_a_real_size(gpu: Gpu, rng: np.random.Generator, case: Linear) -> None:
    """Each of Triton's kernels, with as many rows as it takes."""
    call = linear_call(rng, case, rows=256)
    aligned = {**call.inputs, "x": np.ascontiguousarray(call.inputs["x"])}
    call = replace(call, inputs=aligned)
    for at, variant in enumerate(lower_mixed_input(site_of(call, "tokens", gpu.sm))):
        if all(
            isinstance(one, Launch) and isinstance(one.kernel, KernelSource) for one in variant.work
        ):
            some = take_rows(call, slice(0, variant.max_rows))
            assert_close(some, run_lowered(some, run=gpu.run, sm=gpu.sm, stale=0, variant=at))


@pytest.mark.parametrize(
    "case",
    [
        Linear("bf16", "i6", 1024, 2048, 128, layout="split", out="f32"),
        Linear("bf16", "f4e2m1", 1024, 2048, 32, layout="tiles", powers=True, out="f32"),
        Linear("bf16", "f4e2m1", 1024, 2048, 32, layout="tiles", bytes=True, out="f32"),
    ],
    ids=str,
)
def test_narrow_linears_of_few_rows(gpu: Gpu, rng: np.random.Generator, case: Linear) -> None:
    """The CUDA C++ kernels, with as many rows as each of their variants takes, and one less."""
    call = linear_call(rng, case, 32)
    call = replace(call, inputs={**call.inputs, "x": np.ascontiguousarray(call.inputs["x"])})
    variants = lower_mixed_input(site_of(call, "tokens", gpu.sm))
    few = [at for at, variant in enumerate(variants) if variant.max_rows <= 32]
    assert [variants[at].max_rows for at in few] == [1, 8, 16, 32]
    for at in few:
        for rows in {variants[at].max_rows, max(1, variants[at].max_rows - 1)}:
            some = take_rows(call, slice(0, rows))
            assert_close(some, run_lowered(some, run=gpu.run, sm=gpu.sm, stale=0, variant=at))


@pytest.mark.parametrize(
    "case",
    [
        Linear("bf16", "bf16", 64, 2048, layout="row_major", out="f32"),
        Linear("bf16", "bf16", 257, 2048, bias=True, layout="row_major", out="f32"),
        Linear("f8e4m3", "f8e4m3", 1000, 2048, input_scale=True, residual=True, layout="row_major"),
    ],
    ids=str,
)
def test_linears_of_few_columns(gpu: Gpu, rng: np.random.Generator, case: Linear) -> None:
    """By every kernel but cuBLASLt, with as many rows as it takes, and one less."""
    call = linear_call(rng, case, 64)
    rows = {
        name: call.inputs[name] for name in ("x", "residual") if call.inputs.get(name) is not None
    }
    aligned = {name: np.ascontiguousarray(one) for name, one in rows.items()}
    call = replace(call, inputs={**call.inputs, **aligned})
    variants = lower_gemm(site_of(call, "tokens", gpu.sm))
    kernels = [at for at, one in enumerate(variants) if isinstance(one.work[0], Launch)]
    assert [variants[at].max_rows for at in kernels][:2] == [8, 16]
    for at in kernels:
        most = min(variants[at].max_rows, 64)
        for count in {1, most - 1, most}:
            some = take_rows(call, slice(0, count))
            assert_close(some, run_lowered(some, run=gpu.run, sm=gpu.sm, stale=0, variant=at))


def test_linears_with_scales_of_rows(gpu: Gpu, rng: np.random.Generator) -> None:
    """Long rows, by every kernel but cuBLASLt: as many as it takes, and one less. Of long sums of
    E4M3 products, which kernels for more than 64 rows leave to them, the tensor cores keep some 14
    bits."""
    case = Linear("f8e4m3", "f8e4m3", 4096, 8192, scales=1, residual=True, layout="row_major")
    call = linear_call(rng, case, 256)
    aligned = {name: np.ascontiguousarray(call.inputs[name]) for name in ("x", "residual")}
    call = replace(call, inputs={**call.inputs, **aligned})
    expected = call.reference()["out"].astype(np.float32)
    variants = lower_gemm(site_of(call, "tokens", gpu.sm))
    kernels = [at for at, one in enumerate(variants) if isinstance(one.work[0], Launch)]
    most = [variants[at].max_rows for at in kernels]
    assert most == [8, 32, 64, 128, 192, 256]
    for at, rows in zip(kernels, most, strict=True):
        for count in (rows, rows - 1):
            some = take_rows(call, slice(0, count))
            found = run_lowered(some, run=gpu.run, sm=gpu.sm, stale=0, variant=at)["out"]
            errors = found.astype(np.float32) - expected[:count]
            within = 1 / 256 if rows > 64 else 1 / 1024
            assert np.sqrt(np.mean(errors**2)) < within * expected.std(), (rows, count)


def variant_for(call: KernelCall, rows: int, gpu: Gpu) -> int:
    """The number of the experts' first variant that takes so many rows."""
    variants = lower_moe(site_of(call, "tokens", gpu.sm))
    return next(at for at, one in enumerate(variants) if one.max_rows >= rows)


@pytest.mark.parametrize("rows", [1, 4, 9, 17, 40, 200, 700])
def test_mxfp4_experts_of_a_published_size(gpu: Gpu, rng: np.random.Generator, rows: int) -> None:
    """gpt-oss', which no power of two above 64 divides."""
    experts = GPT_OSS | {"limit": 7.0}
    case = Experts("bf16", "f4e2m1", 2880, 2880, 32, e8m0=True, layout="row_major", **experts)
    call = moe_call(rng, case, rows)
    variant = variant_for(call, rows, gpu)
    assert_close(call, run_lowered(call, run=gpu.run, sm=gpu.sm, stale=0, variant=variant))


@pytest.mark.parametrize("rows", [4, 200, 700])
@pytest.mark.parametrize(
    ("weight", "group", "layout"),
    [
        *(("i4", 16, "row_major"), ("iq4", 16, "row_major"), ("i6", 128, "split")),
        ("f4e2m1", 16, "row_major"),
    ],
)
def test_experts_of_4_and_6_bits(
    gpu: Gpu, rng: np.random.Generator, weight: str, group: int, layout: str, rows: int
) -> None:
    in_units = weight == "f4e2m1"
    case = Experts("bf16", weight, 512, 768, group, layout=layout, units=in_units, words=in_units)
    call = moe_call(rng, case, rows)
    variant = variant_for(call, rows, gpu)
    assert_close(call, run_lowered(call, run=gpu.run, sm=gpu.sm, stale=0, variant=variant))


def with_small_results(call: KernelCall) -> KernelCall:
    """Experts' sums of E4M3 on tensor cores have some 12 bits, by which codes of what `down` reads
    are others, each by a sixteenth: small beside the tolerance only where results are."""
    return replace(call, inputs={**call.inputs, "down_scale": call.inputs["down_scale"] / 4})


@pytest.mark.parametrize("rows", [4, 200])
@pytest.mark.parametrize(("weight", "group"), [("f8e4m3", 128), ("f8e4m3", 0), ("i8", 0)], ids=str)
def test_experts_whose_inputs_have_scales_of_rows(
    gpu: Gpu, rng: np.random.Generator, rows: int, weight: str, group: int
) -> None:
    case = Experts(
        "bf16", weight, 512, 256, group, quant=f"dynamic_{weight}", layout="row_major", top_k=4,
        experts=16,
    )  # fmt: skip
    call = with_small_results(moe_call(rng, case, rows))
    variant = variant_for(call, rows, gpu)
    assert_close(call, run_lowered(call, run=gpu.run, sm=gpu.sm, stale=0, variant=variant))


@pytest.mark.parametrize("rows", [7, 25, 80, 200])
@pytest.mark.parametrize("quant", ["f8e4m3", "dynamic_f8e4m3"])
def test_e4m3_experts_of_every_tile(
    gpu: Gpu, rng: np.random.Generator, quant: str, rows: int
) -> None:
    """Of DeepSeek-V2-Lite's sizes, a quarter of its experts."""
    case = Experts(
        "bf16", "f8e4m3", 2048, 1408, quant=quant, layout="row_major", top_k=6, experts=16
    )
    call = with_small_results(moe_call(rng, case, rows))
    variant = variant_for(call, rows, gpu)
    assert_close(call, run_lowered(call, run=gpu.run, sm=gpu.sm, stale=0, variant=variant))


def of_size_one(call: KernelCall) -> KernelCall:
    """Experts in bf16 whose sums are as large as what they read: else sums that cancel are compared
    with values that are thousands."""
    weights = {name: call.inputs[name].astype(np.float32) for name in ("gate_up", "down")}
    scaled = {
        name: (weight * weight.shape[-1] ** -0.5).astype(NUMPY_DTYPES["bf16"])
        for name, weight in weights.items()
    }
    return replace(call, inputs={**call.inputs, **scaled})


@pytest.mark.parametrize(("rows", "variant"), [(4, 0), (200, -1)])
@pytest.mark.parametrize(
    "case",
    [
        Experts("bf16", "bf16", 512, 256, layout="row_major", top_k=4, experts=16),
        Experts(
            "bf16", "f8e4m3", 512, 256, quant="dynamic_f8e4m3", layout="row_major", top_k=4,
            experts=16,
        ),
        Experts(
            "bf16", "f4e2m1", 512, 256, 32, e8m0=True, layout="row_major", top_k=4, experts=16,
            **GPT_OSS,
        ),
    ],
    ids=str,
)  # fmt: skip
def test_experts_of_one_of_four_ranks(
    gpu: Gpu, rng: np.random.Generator, case: Experts, rows: int, variant: int
) -> None:
    call = with_experts(moe_call(rng, case, rows), range(4, 8))
    if case.weight == "bf16":
        call = of_size_one(call)
    if case.quant != "none":
        call = with_small_results(call)
    assert_close(call, run_lowered(call, run=gpu.run, sm=gpu.sm, stale=0, variant=variant))


@pytest.mark.parametrize(("rows", "variant"), [(4, 0), (200, 2)])
@pytest.mark.parametrize("router", ROUTERS)
def test_routers_of_as_many_experts_as_are_published(
    gpu: Gpu, rows: int, variant: int, router: str
) -> None:
    """A fixed seed: of 256 experts two may be nearly as good, and exp is rounded otherwise. That
    moves what experts round to bf16, and their sum may cancel: it is compared with the largest."""
    biased = router != "sparsemixer"
    case = Experts(
        "bf16", "bf16", 128, 64, layout="row_major", top_k=8, experts=256, router=router,
        choice_bias=biased, renormalize=int(biased), shared=True, shared_gate=True,
    )  # fmt: skip
    call = moe_call(np.random.default_rng(11), case, rows)
    found = run_lowered(call, run=gpu.run, sm=gpu.sm, stale=0, variant=variant)["out"]
    expected = call.reference()["out"].astype(np.float32)
    np.testing.assert_allclose(
        found.astype(np.float32), expected, rtol=1 / 64, atol=np.abs(expected).max() / 256
    )


@pytest.mark.parametrize(("rows", "variant"), [(4, 0), (40, 1), (200, 2), (1000, 2)])
def test_experts_without_a_gate(
    gpu: Gpu, rng: np.random.Generator, rows: int, variant: int
) -> None:
    """Of Nemotron-3 Nano's sizes, of which no power of two above 128 divides the first."""
    case = Experts("bf16", "bf16", 2688, 1856, layout="row_major", experts=16, top_k=6, **GATELESS)
    call = of_size_one(moe_call(rng, case, rows))
    assert_close(call, run_lowered(call, run=gpu.run, sm=gpu.sm, stale=0, variant=variant))


@pytest.mark.parametrize("out_dtype", ["f8e4m3", "i8"])
def test_every_bf16_is_quantised_as_the_reference_does(
    gpu: Gpu, rng: np.random.Generator, out_dtype: str
) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    values = bits[(bits & 0x7F80) != 0x7F80].view(NUMPY_DTYPES["bf16"])
    x = values.reshape(-1, 510)
    for scale in [1.0, 2**-6, 0.1, *np.exp(rng.uniform(-12, 6, 60))]:
        call = KernelCall(
            REGISTRY["quantize"], {"out_dtype": out_dtype}, {"x": x, "out_scale": scalar(scale)}
        )
        assert_close(call, run_lowered(call, run=gpu.run, sm=gpu.sm))


def test_f32_is_quantised_as_the_reference_does(gpu: Gpu, rng: np.random.Generator) -> None:
    for out_dtype in ("f8e4m3", "i8"):
        for scale in np.exp(rng.uniform(-12, 6, 10)):
            codes = rng.integers(-400, 400, (512, 512)) / 2  # many ties and their neighbours
            near = codes * scale * (1 + rng.integers(-2, 3, codes.shape) * 2.0**-24)
            call = KernelCall(
                REGISTRY["quantize"],
                {"out_dtype": out_dtype},
                {"x": near.astype(np.float32), "out_scale": scalar(scale)},
            )
            assert_close(call, run_lowered(call, run=gpu.run, sm=gpu.sm))


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("pool", ["i8", "u8"])
def test_attention_to_heads_with_scales_of_their_own(gpu: Gpu, pool: str, head_dim: int) -> None:
    """Decodes in the shortest splits and the longest, and mixed steps, which also run tiles."""
    case = {"heads": 32, "kv_heads": 8, "head_dim": head_dim, "pool": pool, "page_size": 16}
    lower = "trtc.plugins.paged_attention.cuda:lower"
    contexts = (1, 16, 37, 64, 257, 1100)
    decodes = make_call([Sequence(context, 1) for context in contexts], **case)
    mixed = make_call(
        [Sequence(1, 1), Sequence(700, 1), Sequence(37, 37), Sequence(90, 13)], **case
    )
    for run in (gpu.run, gpu.run_apart):
        for call, variant, weights in ((decodes, 0, 2.0**-15), (decodes, -2, 2.0**-15)):
            out = run_variant(call, lower, gpu.sm, variant, run)
            assert_attention_close(call, out, np.arange(call.num_tokens), weights)
        out = run_variant(mixed, lower, gpu.sm, -1, run)
        assert_attention_close(mixed, out, np.arange(mixed.num_tokens), 2.0**-8)


@pytest.mark.parametrize("name", PUBLISHED)
def test_latent_attention_of_published_sizes(gpu: Gpu, rng: np.random.Generator, name: str) -> None:
    """Mixed steps, and decodes in the shortest splits and the longest."""
    shape = PUBLISHED[name]
    decodes = step_of(shape, ((1, 1), (1, 64), (1, 65), (1, 700)))
    mixed = step_of(shape, ((1, 1), (37, 37), (1, 700), (13, 50)))
    for call, variant in ((decodes, 0), (decodes, -2), (mixed, -1)):
        found = run_lowered(call, run=gpu.run, sm=gpu.sm, stale=0, variant=variant)["out"]
        # Weights are rounded to bf16 before they multiply the latents.
        np.testing.assert_allclose(
            found.astype(np.float32),
            call.reference()["out"].astype(np.float32),
            rtol=1 / 64,
            atol=1 / 64,
        )
    absorbed = expanding(mixed, least_new=13, room=512)
    expanded = expanded_call(shape, absorbed)
    assert_close(expanded, run_lowered(expanded, run=gpu.run, sm=gpu.sm, stale=0))
    write = write_call(rng, shape)
    outputs = run_lowered(write, run=gpu.run, sm=gpu.sm)
    assert_close(write, {**write.reference(), "q_out": outputs["q_out"]})
    for rows in (1, 17, 200):
        product = head_linear_call(
            rng, "bf16", heads=shape.num_heads, n=shape.rank, k=shape.nope_dim, rest=64, rows=rows
        )
        assert_close(product, run_lowered(product, run=gpu.run, sm=gpu.sm))


@pytest.mark.parametrize("name", ["DeepSeek-V2-Lite", "GLM-4.7-Flash", "Mistral-Small-4"])
def test_expanded_latents_of_published_sizes(gpu: Gpu, name: str) -> None:
    """Prompts of several tiles, with earlier context and without, beside sequences that are passed
    over; the last one has no room."""
    shape = PUBLISHED[name]
    step = step_of(shape, ((1, 1), (300, 300), (5, 90), (129, 701), (128, 128), (130, 257)))
    call = expanded_call(shape, expanding(step, least_new=128, room=1408))
    for run in (gpu.run, gpu.run_apart):
        out = run_lowered(call, run=run, sm=gpu.sm, stale=0)["out"]
        assert_close(call, {"out": out})
        np.testing.assert_array_equal(out[-130:], np.asarray(call.inputs["attended"])[-130:])


@pytest.mark.parametrize("heads", [64, 32])
def test_selection_of_published_sizes(gpu: Gpu, rng: np.random.Generator, heads: int) -> None:
    """Whole numbers, whose sums are exact: few rows share programs, many have programs of their
    own."""
    shape = IndexShape(num_heads=heads, width=128, top_k=256)
    kinds = ((1, 1), (40, 40), (1, 257), (13, 300), (9, 1000))
    call = index_step_of(shape, kinds)
    for variant in (0, -1):
        found = run_lowered(call, run=gpu.run, sm=gpu.sm, stale=0, variant=variant)["selected"]
        np.testing.assert_array_equal(found, call.reference()["selected"])
    write = index_write_call(rng, replace(shape, rotary_dim=64))
    outputs = run_lowered(write, run=gpu.run, sm=gpu.sm)
    assert_close(write, {**write.reference(), "q_out": outputs["q_out"]})
    found, wanted = outputs["pool_out"], write.reference()["pool_out"]
    np.testing.assert_allclose(
        found.astype(np.float32), wanted.astype(np.float32), rtol=1 / 64, atol=1 / 64
    )


def launch_of(op: str, site: Site) -> Launch:
    (launch,) = launches_of(Work(f"trtc.plugins.{op}.cuda:lower", (site,), -1, {}, {}))
    assert isinstance(launch, Launch)
    return launch


@pytest.mark.parametrize("rows", [1, 200])
def test_overlapping_launches_see_what_those_before_wrote(
    gpu: Gpu, rng: np.random.Generator, rows: int
) -> None:
    """A long chain, each kernel reading what the last wrote, is the same without overlaps."""
    call = next(
        one
        for one in large_calls(rng, rows)
        if one.op.name == "rms_norm" and one.attributes["out_dtype"] == "bf16"
    )
    half = {name: np.asarray(call.inputs["x"])[:, : HIDDEN // 2] for name in ("gate", "up")}
    gating = KernelCall(REGISTRY["swiglu"], {"activation": "silu", "out_dtype": "bf16"}, half)
    norm, swiglu = (
        launch_of(one.op.name, replace(site, strides=dict.fromkeys(site.strides, HIDDEN)))
        for one in (call, gating)
        for site in [site_of(one, "tokens", gpu.sm)]
    )
    bucket = {"tokens": rows, "one": 1}
    arrays = {name: array for name, array in call.inputs.items() if array is not None}
    arrays |= {name: np.zeros_like(arrays["x"]) for name in ("out", "total")}
    arrays[DIMS] = np.array([rows, rows, rows, 0], np.int32)
    answers = []
    for overlaps in (False, True):
        places = gpu.upload(arrays)
        back = places | {"x": places["total"], "total": places["x"]}
        gates = {
            "gate": places["out"],
            "up": Place(places["out"].memory, HIDDEN),  # bytes: the second half of a row
            DIMS: places[DIMS],
            "out": places["residual"],
        }
        for _ in range(100):
            for launch, named in ((norm, places), (swiglu, gates), (norm, back)):
                given = [named[name] for name in launch.arguments]
                gpu.launch(launch, bucket, given, overlaps=overlaps)
        answers.append({name: gpu.fetch(places[name], array) for name, array in arrays.items()})
    for name, apart in answers[0].items():
        assert apart.tobytes() == answers[1][name].tobytes(), name


PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(temperature=0.6, top_p=0.9),
    SamplingParams(temperature=1.5, top_p=0.95),
    SamplingParams(top_k=40),
    SamplingParams(top_k=900, top_p=0.8),
    SamplingParams(min_p=0.05, temperature=2.0),
    SamplingParams(temperature=0.8, repetition_penalty=1.3, presence_penalty=0.5),
    SamplingParams(temperature=0.0, frequency_penalty=1.0, logit_bias={3: 4.0, 9: -100.0}),
    SamplingParams(top_p=0.5, top_k=20, min_p=0.01, logit_bias={7: 9.0}),
)


@pytest.mark.parametrize(("vocab", "rows"), [(32_000, 2000), (128_256, 300), (151_936, 60)])
@pytest.mark.parametrize("spread", [1.0, 4.0])
def test_tokens_are_those_of_the_host(
    gpu: Gpu, rng: np.random.Generator, vocab: int, rows: int, spread: float
) -> None:
    logits = rng.normal(size=(rows, vocab)).astype(np.float32) * np.float32(spread)
    params = [
        with_fields(PARAMS[row % len(PARAMS)], seed=int(rng.integers(2**63))) for row in range(rows)
    ]
    seen = {
        row: (rng.integers(0, vocab, 50).tolist(), rng.integers(0, 50, 30).tolist())
        for row, one in enumerate(params)
        if one.repetition_penalty != 1 or one.frequency_penalty
    }
    counts = {row: counts_of(*tokens) for row, tokens in seen.items()}
    batch = SamplingBatch.of(params, counts=counts)
    found = sample_by_stages(logits, batch, run=gpu.run, sm=gpu.sm)
    assert not found["invalid"].any()
    expected = sample(logits, batch).token_ids
    random = uniforms(batch.seed, batch.sequence, batch.position)
    others = np.flatnonzero(found["sampled"][:, 0] != expected)
    print(f"{len(others)} of {rows} rows differ")  # noqa: T201
    assert len(others) < 1 + rows // 100
    for row in others:
        scores = edited(logits[row], params[row], *seen.get(int(row), ([], [])))
        assert params[row].temperature > 0
        assert is_borderline(scores, params[row], float(random[row]))


@pytest.mark.parametrize(("vocab", "rows"), [(32_003, 600), (151_936, 60)])
def test_tokens_under_masks_and_with_pending_tokens_are_those_of_the_host(
    gpu: Gpu, rng: np.random.Generator, vocab: int, rows: int
) -> None:
    case = Case(
        params=tuple(with_fields(PARAMS[row % len(PARAMS)], seed=row) for row in range(rows)),
        logits=rng.normal(size=(rows, vocab)).astype(np.float32) * np.float32(4),
        prompts=tuple(rng.integers(0, vocab, 300).tolist() for _ in range(rows)),
        outputs=tuple(rng.integers(0, vocab, row % 9).tolist() for row in range(rows)),
    )
    allowed, masks = drawn_masks(case.logits.shape, seed=int(rng.integers(2**32)))
    batch, before = with_last_pending(case, seed=int(rng.integers(2**32)))
    batch = with_fields(batch, masks=masks)
    found = sample_by_stages(case.logits, batch, sampled=before, run=gpu.run, sm=gpu.sm)
    assert not found["invalid"].any()
    expected = sample(case.logits, with_pending_counted(batch, before)).token_ids
    random = uniforms(batch.seed, batch.sequence, batch.position)
    others = np.flatnonzero(found["sampled"][:, 0] != expected)
    assert len(others) < 1 + rows // 100
    for row in others.tolist():
        scores = np.where(allowed[row], case.scores(row), -np.inf).tolist()
        assert case.params[row].temperature > 0
        assert is_borderline(scores, case.params[row], float(random[row]))


@pytest.mark.parametrize("params", PARAMS[1:7])
def test_drawn_tokens_follow_the_distribution(
    gpu: Gpu, rng: np.random.Generator, params: SamplingParams
) -> None:
    number, vocab = 20_000, 300
    row = (rng.normal(size=vocab) * 2).astype(np.float32)
    batch = SamplingBatch.of([with_fields(params, seed=11)] * number, position=list(range(number)))
    logits: Float32s = np.tile(row, (number, 1))
    found = sample_by_stages(logits, batch, run=gpu.run, sm=gpu.sm)
    expected = np.array(distribution(edited(row, params, [], []), params)) * number
    observed = np.bincount(found["sampled"][:, 0], minlength=vocab)
    assert observed[expected == 0].sum() == 0
    assert is_likely(observed, expected)


def test_logprobs_are_those_of_the_host(gpu: Gpu, rng: np.random.Generator) -> None:
    rows, vocab = 64, 128_256
    logits = rng.normal(size=(rows, vocab)).astype(np.float32) * 3
    logits[5, 1000:3000] = 30.0
    params = [PARAMS[row % len(PARAMS)] for row in range(rows)]
    asked = [None if row % 5 == 4 else row % 21 for row in range(rows)]
    batch = SamplingBatch.of(params, num_logprobs=asked)
    expected = sample(logits, batch).logprobs
    found = sample_by_stages(logits, batch, run=gpu.run, sm=gpu.sm)
    assert expected is not None
    for at, row in enumerate(expected.rows.tolist()):
        number = int(expected.num_top[at])
        assert found["token_logprobs"][row, 0] == pytest.approx(expected.token[at], abs=1e-4)
        assert found["top_ids"][row, :number].tolist() == expected.top_ids[at, :number].tolist()
        top = found["top_logprobs"][row, :number]
        assert top == pytest.approx(expected.top[at, :number], abs=1e-4)
