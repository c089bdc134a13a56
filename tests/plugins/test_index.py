"""The kernels that select tokens: against their references, and alike in other batches."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.support.index_calls import (
    ROWS,
    IndexHistory,
    IndexShape,
    positions_of,
    random_history,
    select_call,
    write_calls,
)
from tests.support.kernels import (
    KernelLibrary,
    assert_writes_agree,
    available_isas,
    compile_kernels,
)
from trtc.plugins.registry import REGISTRY

SHAPES = {
    "f32": IndexShape("f32", "f32", 5, 8, page_size=8),
    "bf16": IndexShape(),
    "fp8": IndexShape(pool_dtype="f8e4m3", num_heads=7, width=16, top_k=1),
    "long": IndexShape("f32", "f32", width=32, top_k=600),
    "deepseek": IndexShape(num_heads=64, width=128, top_k=128),
}
MIXED = ((1, 1), (1, 20), (1, 21), (1, 65), (5, 5), (64, 64), (70, 200), (3, 515), (1, 1100))
"""(new tokens, context), on and beside borders of pages, of the selection, and spans of 512."""


@pytest.fixture(scope="module", params=available_isas())
def library(request: pytest.FixtureRequest) -> KernelLibrary:
    rng = np.random.default_rng(0)
    calls = [
        select_call(rng, shape, [(random_history(rng, shape, 1), 1, 1)])
        for shape in SHAPES.values()
    ]
    return compile_kernels([*calls, *write_calls()], request.param)


def test_the_reference_selects_what_torchs_topk_does() -> None:
    """As DeepSeek-V3.2 scores: with the scale of q . k and that of the number of heads, of which 16
    make no two scores equal."""
    rng, shape = np.random.default_rng(4), IndexShape("f32", "f32")
    history = random_history(rng, shape, 90)
    call = select_call(rng, shape, [(history, 90, 90)])
    found = positions_of(call, call.reference()["selected"])
    q = torch.from_numpy(history.q).view(90, shape.num_heads, shape.width)
    scores = torch.relu(torch.einsum("shd,td->sht", q, torch.from_numpy(history.keys)))
    weights = torch.from_numpy(history.weights) * shape.num_heads**-0.5
    scores = torch.einsum("sh,sht->st", weights, scores * shape.width**-0.5)
    scores = scores.masked_fill(torch.ones(90, 90).triu(1).bool(), -torch.inf)
    for row in range(90):
        count = min(row + 1, shape.top_k)
        assert found[row] == sorted(scores[row].topk(count).indices.tolist())


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("name", SHAPES)
def test_of_equal_scores_the_earlier_token_is_selected(
    library: KernelLibrary, name: str, num_threads: int
) -> None:
    """Sums of whole numbers are exact."""
    shape, rng = SHAPES[name], np.random.default_rng(3)
    tails = [
        (random_history(rng, shape, context, whole=True), new, context) for new, context in MIXED
    ]
    call = select_call(rng, shape, tails)
    found = library.run(call, num_threads)["selected"]
    np.testing.assert_array_equal(found, call.reference()["selected"])


@pytest.mark.parametrize("name", SHAPES)
def test_neither_batches_nor_chunks_nor_threads_change_a_selection(
    library: KernelLibrary, name: str
) -> None:
    shape, rng = SHAPES[name], np.random.default_rng(3)
    tails = [(random_history(rng, shape, context), new, context) for new, context in MIXED]

    def selections(
        tails: list[tuple[IndexHistory, int, int]], seed: int, num_threads: int
    ) -> list[list[int]]:
        call = select_call(np.random.default_rng(seed), shape, tails)
        return positions_of(call, library.run(call, num_threads)["selected"])

    together, last = selections(tails, 5, 2), 0
    for history, new, context in tails:
        mine, last = together[last : last + new], last + new
        seen = range(context - new + 1, context + 1)
        assert [len(one) for one in mine] == [min(shape.top_k, count) for count in seen]
        assert selections([(history, new, context)], 6, 1) == mine
        assert selections([(history, 1, context)], 7, 2) == mine[-1:]


def test_scores_that_are_no_numbers_count_as_the_smallest(library: KernelLibrary) -> None:
    shape, rng = SHAPES["f32"], np.random.default_rng(3)
    history = random_history(rng, shape, 60, whole=True)
    keys = history.keys.copy()
    keys[10:45] = np.nan
    call = select_call(rng, shape, [(replace(history, keys=keys), 9, 60)])
    found = library.run(call)["selected"]
    np.testing.assert_array_equal(found, call.reference()["selected"])
    rest = {*range(10), *range(45, 52)}
    assert set(positions_of(call, found)[0]) == rest | {10, 11, 12}


@pytest.mark.parametrize("call", write_calls(), ids=lambda call: str(call.inputs["pool"].dtype))
def test_writes_agree_with_the_reference(library: KernelLibrary, call) -> None:
    assert_writes_agree(call, library.run(call, 2))


def test_the_reference_normalises_and_rotates_as_torch_does() -> None:
    call = write_calls()[0]
    given = {name: np.asarray(array) for name, array in call.inputs.items()}
    width, half = given["k"].shape[1], given["cos"].shape[1]
    normed = torch.nn.functional.layer_norm(
        torch.from_numpy(np.ascontiguousarray(given["k"])),
        (width,),
        torch.from_numpy(given["norm"]),
        torch.from_numpy(given["bias"]),
        eps=1e-6,
    )
    cos, sin = (torch.from_numpy(given[name][given["positions"]]) for name in ("cos", "sin"))
    first, second, rest = normed.split((half, half, width - 2 * half), -1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)
    q_out, pool = REGISTRY["index_write"].reference(**given, **call.attributes)
    written = pool.reshape(-1, width)[given["slots"]]
    np.testing.assert_allclose(written, turned, atol=1e-5, rtol=1e-5)
    heads = q_out.reshape(ROWS, -1, width)
    np.testing.assert_array_equal(heads[..., 2 * half :].ravel(), _rest(given["q"], width, half))


def _rest(q: np.ndarray, width: int, half: int) -> np.ndarray:
    return q.reshape(len(q), -1, width)[..., 2 * half :].ravel()
