"""The kernels of latent attention: against their references, and bit for bit in other batches."""

from functools import cache

import numpy as np
import pytest
import torch

from tests.support.kernels import (
    KernelCall,
    KernelLibrary,
    assert_close,
    assert_writes_agree,
    available_isas,
    compile_kernels,
)
from tests.support.latent_calls import (
    LatentHistory,
    LatentShape,
    attention_call,
    head_linear_calls,
    random_history,
    write_calls,
)
from tests.support.operands import Array
from trtc.plugins.registry import REGISTRY

SHAPES = {
    "f32": LatentShape("f32", "f32", 3, 24, 8, 16, 8),
    "bf16": LatentShape(num_heads=20, rank=128, rotary_dim=64),
    "fp8": LatentShape(pool_dtype="f8e4m3"),
    "group_of_80": LatentShape("f32", "f32", 80, 8, 8, 8),
    "selected": LatentShape("f32", "f32", 3, 24, 8, 16, 8, top_k=20),
    "selected_bf16": LatentShape(num_heads=20, rank=128, rotary_dim=64, top_k=64),
    "selected_of_80": LatentShape("f32", "f32", 80, 8, 8, 8, top_k=600),
    "deepseek": LatentShape(num_heads=16, rank=512, rotary_dim=64, nope_dim=128),
}
MIXED = ((1, 1), (1, 17), (1, 64), (1, 65), (5, 5), (64, 64), (70, 200), (3, 515), (1, 1100))
"""(new tokens, context), on and beside borders of pages, blocks of 64 keys and spans of 512."""
OTHERS = (*write_calls(), *head_linear_calls())


@pytest.fixture(scope="module", params=available_isas())
def library(request: pytest.FixtureRequest) -> KernelLibrary:
    rng = np.random.default_rng(0)
    calls = [
        attention_call(rng, shape, [(random_history(rng, shape, 1), 1, 1)])
        for shape in SHAPES.values()
    ]
    return compile_kernels([*calls, *OTHERS], request.param)


def run(
    library: KernelLibrary,
    shape: LatentShape,
    tails: list[tuple[LatentHistory, int, int]],
    num_threads: int = 1,
    seed: int = 5,
) -> list[Array]:
    """Outputs of each sequence of a step, whose pages are scattered by `seed`."""
    call = attention_call(np.random.default_rng(seed), shape, tails)
    out = library.run(call, num_threads)["out"]
    return np.split(out, np.cumsum([new for _, new, _ in tails])[:-1])


def test_the_absorbed_form_is_torchs_attention_to_expanded_keys_and_values() -> None:
    """With W_UK and W_UV drawn at random, and by torch's attention of heads of 24 + 8."""
    rng = np.random.default_rng(4)
    shape = SHAPES["f32"]
    heads, tokens = shape.num_heads, 21
    history = random_history(rng, shape, tokens)
    q = rng.standard_normal((tokens, heads, shape.head_dim)).astype(np.float32)
    w_k = rng.standard_normal((heads, shape.nope_dim, shape.rank)).astype(np.float32)
    w_v = rng.standard_normal((heads, 12, shape.rank)).astype(np.float32)

    op = REGISTRY["head_linear"]
    flat = q.reshape(tokens, -1)
    keys = w_k.swapaxes(1, 2)
    (absorbed,) = op.reference(flat, keys, in_dim=shape.head_dim, out_dim=shape.width)
    call = attention_call(rng, shape, [(LatentHistory(absorbed, history.latents), tokens, tokens)])
    attended = call.reference()["out"]
    (found,) = op.reference(attended, w_v, in_dim=shape.rank, out_dim=12)

    latents = torch.from_numpy(history.latents)
    latent, rope = latents[:, : shape.rank], latents[:, shape.rank :]
    plain = torch.einsum("hnr,tr->htn", torch.from_numpy(w_k), latent)
    k = torch.cat((plain, rope.expand(heads, -1, -1)), -1)
    v = torch.einsum("hnr,tr->htn", torch.from_numpy(w_v), latent)
    expected = torch.nn.functional.scaled_dot_product_attention(
        torch.from_numpy(q).swapaxes(0, 1), k, v, is_causal=True, scale=shape.head_dim**-0.5
    )
    np.testing.assert_allclose(
        found.reshape(tokens, heads, 12), expected.swapaxes(0, 1), atol=2e-5, rtol=1e-4
    )


@cache
def mixed_batch(name: str) -> KernelCall:
    shape = SHAPES[name]
    rng = np.random.default_rng(3)
    tails = [(random_history(rng, shape, context), new, context) for new, context in MIXED[-4:]]
    return attention_call(rng, shape, tails)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("name", SHAPES)
def test_attention_of_mixed_batches_agrees_with_the_reference(
    library: KernelLibrary, name: str, num_threads: int
) -> None:
    call = mixed_batch(name)
    assert_close(call, library.run(call, num_threads))


@pytest.mark.parametrize("name", SHAPES)
def test_neither_batches_nor_chunks_nor_threads_change_a_bit(
    library: KernelLibrary, name: str
) -> None:
    shape = SHAPES[name]
    rng = np.random.default_rng(3)
    tails = [(random_history(rng, shape, context), new, context) for new, context in MIXED]
    together = run(library, shape, tails, num_threads=2)
    for (history, new, context), found in zip(tails, together, strict=True):
        (alone,) = run(library, shape, [(history, new, context)], seed=6)
        assert alone.tobytes() == found.tobytes()
        (last,) = run(library, shape, [(history, 1, context)], num_threads=2, seed=7)
        assert last[0].tobytes() == found[-1].tobytes()


@pytest.mark.parametrize("call", write_calls(), ids=lambda call: str(call.inputs["pool"].dtype))
def test_writes_agree_with_the_reference(library: KernelLibrary, call) -> None:
    assert_writes_agree(call, library.run(call, 2))


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("call", head_linear_calls(), ids=lambda call: str(call.inputs["x"].shape))
def test_products_by_head_agree_with_the_reference_and_rows_are_independent(
    library: KernelLibrary, call, num_threads: int
) -> None:
    outputs = library.run(call, num_threads)
    assert_close(call, outputs)
    x = call.inputs["x"]
    for row in range(0, len(x), 5):
        alone = type(call)(call.op, call.attributes, {**call.inputs, "x": x[row : row + 1]})
        assert library.run(alone)["out"].tobytes() == outputs["out"][row : row + 1].tobytes()
