"""The operators of latent attention as they are lowered for a GPU, by Triton's interpreter, against
their references; and compiled for sizes of published models."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from tests.support.compiled import compiled, together
from tests.support.kernels import KernelCall, assert_close
from tests.support.latent_calls import (
    PUBLISHED,
    LatentShape,
    attention_call,
    expanded_call,
    expanding,
    head_linear_calls,
    random_history,
    step_of,
    write_calls,
)
from tests.support.lowered import run_lowered, site_of
from tests.support.triton_kernels import needs_triton
from trtc.plugins.gpu.arch import ARCHS
from trtc.plugins.gpu.lowering import Launch, Site, Variant
from trtc.plugins.gpu.sources import CudaSource
from trtc.plugins.latents.expansion import LEAST_NEW, MAX_BYTES, room_for
from trtc.protos.manifest import Limits

needs_triton()

from trtc.builder.targets.gpu.lowerings import lowerings  # noqa: E402
from trtc.plugins.expanded_latent_attention.buffers import WIDE_KEYS, WIDE_VALUES  # noqa: E402

SHAPES = {
    "f32": LatentShape("f32", "f32", 3, 24, 8, 16, 8),
    "20 heads": LatentShape("f32", "f32", 20, 32, 16, 16),
    "fp8": LatentShape("f32", "f8e4m3", 18, 16, 16, 16),
    "selected": LatentShape("f32", "f32", 3, 24, 8, 16, 8, top_k=40),
    "selected, 20 heads": LatentShape("f32", "f8e4m3", 20, 32, 16, 16, top_k=64),
}
MIXED = ((1, 1), (37, 37), (1, 70), (13, 50), (1, 300))
"""(new tokens, context)"""
PROMPTS = ((1, 1), (3, 70), (33, 133), (32, 32), (33, 200))
"""With 32 new tokens or more and 384 tokens of room the last one has none left."""
DECODES = ((1, 1), (1, 64), (1, 65), (1, 300))


@pytest.mark.parametrize("name", SHAPES)
def test_mixed_steps_agree_with_the_reference(name: str) -> None:
    call = step_of(SHAPES[name], MIXED)
    assert_close(call, run_lowered(call, stale=0))


@pytest.mark.parametrize("pool_dtype", ["f32", "f8e4m3"])
def test_prompts_are_expanded_while_there_is_room(pool_dtype: str) -> None:
    """What each of both operators leaves to the other is poison, or what it was."""
    shape = replace(SHAPES["f32"], num_heads=2, pool_dtype=pool_dtype)
    absorbed = expanding(step_of(shape, PROMPTS), least_new=32, room=384)
    call = expanded_call(shape, absorbed)
    starts = np.asarray(call.inputs["query_start"])
    taken = np.zeros(int(starts[-1]), bool)
    for sequence in (2, 3):
        taken[starts[sequence] : starts[sequence + 1]] = True
    found, wanted = run_lowered(absorbed, stale=0)["out"], absorbed.reference()["out"]
    assert np.isnan(found[taken].astype(np.float32)).all()
    assert_close(absorbed, {"out": np.where(taken[:, None], wanted, found)})
    out = run_lowered(call, stale=0)["out"]
    assert_close(call, {"out": out})
    np.testing.assert_array_equal(out[~taken], np.asarray(call.inputs["attended"])[~taken])


def test_of_prompts_with_a_selection_those_that_it_holds_are_expanded() -> None:
    """40 tokens are selected; of those with 32 new tokens or more one has a context of 32."""
    shape = replace(SHAPES["selected"], num_heads=2)
    absorbed = expanding(step_of(shape, PROMPTS), least_new=32, room=384, most_context=40)
    starts = np.asarray(absorbed.inputs["query_start"])
    taken = np.arange(starts[-1])[starts[3] : starts[4]]
    found, wanted = run_lowered(absorbed, stale=0)["out"], absorbed.reference()["out"]
    assert np.isnan(found[taken]).all() and not wanted[taken].any()
    found[taken] = 0
    assert_close(absorbed, {"out": found})
    call = expanded_call(shape, absorbed)
    out = run_lowered(call, stale=0)["out"]
    assert_close(call, {"out": out})
    changed = (out != np.asarray(call.inputs["attended"])).any(axis=1)
    assert np.flatnonzero(changed).tolist() == taken.tolist()


@pytest.mark.parametrize("variant", [0, -2])
@pytest.mark.parametrize("name", SHAPES)
def test_decodes_agree_with_the_reference(name: str, variant: int) -> None:
    """In the shortest splits and the longest."""
    call = step_of(SHAPES[name], DECODES)
    assert_close(call, run_lowered(call, stale=2, variant=variant))


@pytest.mark.parametrize("call", write_calls(), ids=lambda call: str(call.inputs["pool"].dtype))
def test_writes_agree_with_the_reference(call: KernelCall) -> None:
    outputs, expected = run_lowered(call), call.reference()
    assert_close(call, {"q_out": outputs["q_out"], "pool_out": expected["pool_out"]})
    found, wanted = (x.astype(np.float32) for x in (outputs["pool_out"], expected["pool_out"]))
    step_of = {"float32": 1e-5, "bfloat16": 1 / 64, "float8_e4m3fn": 1 / 8}
    within = step_of[str(outputs["pool_out"].dtype)]
    assert (np.abs(found - wanted) <= within * np.abs(wanted) + within).all()


@pytest.mark.parametrize("variant", [0, -1])
@pytest.mark.parametrize("call", head_linear_calls(), ids=lambda call: str(call.inputs["x"].shape))
def test_products_by_head_agree_with_the_reference(call: KernelCall, variant: int) -> None:
    assert_close(call, run_lowered(call, variant=variant))


def site(call: KernelCall, sm: int) -> Site:
    limits = Limits(max_batch_size=256, max_seq_len=32768, max_num_tokens=8192)
    return replace(site_of(call, "tokens", sm), limits=limits)


@pytest.mark.parametrize(
    ("names", "sm"),
    [(tuple(PUBLISHED), 90), (("DeepSeek-V3 fp8",), 80), (("DeepSeek-V3 fp8",), 86)],
)
def test_attention_of_published_sizes_compiles(names: Sequence[str], sm: int) -> None:
    """Beside those of WGMMA, the SMs of most and of least shared memory."""
    variants = [variant for name in names for variant in published_variants(name, sm)]
    assert [len(variant.work) for variant in variants] == [3] * 2 * len(names)
    assert len(list(compiled(together(variants), sm))) == 6 * len(names)


def published_variants(name: str, sm: int) -> tuple[Variant, Variant]:
    """Of all rows: absorbed and expanded."""
    shape, rng = PUBLISHED[name], np.random.default_rng(0)
    if shape.pool_dtype == "f8e4m3" and not ARCHS[sm].has_e4m3:
        shape = replace(shape, pool_dtype="bf16")
    call = attention_call(rng, shape, [(random_history(rng, shape, 1), 1, 1)])
    *decodes, every = lowerings()["latent_attention"](site(call, sm))
    assert [one.kind for one in decodes] == ["decode"] * len(decodes)
    assert [one.max_rows for one in decodes] == sorted(one.max_rows for one in decodes)
    assert max(sum(one.scratch.values()) for one in (*decodes, every)) < 2 << 30
    token_bytes = 2 * shape.num_heads * (shape.head_dim + shape.value_dim)
    room = room_for(token_bytes, 32768, 8192)
    absorbed = expanding(call, LEAST_NEW, room)
    expanded = site(expanded_call(shape, absorbed), sm)
    decode, few, prompts = lowerings()["expanded_latent_attention"](expanded)
    assert (decode.work, few.work, few.max_rows) == ((), (), LEAST_NEW - 1)
    wide = sum(prompts.scratch[name] for name in (WIDE_KEYS, WIDE_VALUES))
    assert wide == token_bytes * room <= MAX_BYTES
    last = prompts.work[-1]
    assert isinstance(last, Launch) and isinstance(last.kernel, CudaSource) == (sm == 90)
    assert room >= (8192 if shape.num_heads > 100 else 32768)
    return every, prompts
