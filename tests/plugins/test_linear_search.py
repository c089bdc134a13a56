"""The largest results of few rows, found from one plane (plugins/linear/search.hpp)."""

from dataclasses import replace

import numpy as np
import pytest

from tests.support.kernels import KernelCall, KernelLibrary, available_isas, compile_kernels
from tests.support.linear_calls import Case, linear_call, take_rows
from tests.support.operands import random_array
from tests.support.weights import stored
from trtc.builder.transforms import GroupCodes, GroupScales
from trtc.plugins.layouts import pack_columns
from trtc.plugins.rounding import cast

COLUMNS, DEPTH, GROUP = 3000, 512, 128
PLAIN = Case(
    "bf16", "i8", COLUMNS, DEPTH, GROUP, activation="dynamic_i8", layout="planes", out="f32"
)
CASES = [
    PLAIN,
    replace(PLAIN, bias=True),
    replace(PLAIN, softcap=20.0),
    replace(PLAIN, columns=9, depth=136, out="bf16"),
]
SEARCHED_ROWS = (1, 2, 3, 5, 8, 13)
"""13 are searched for with AVX2 only."""


def normal_call(case: Case, rows: int = 20) -> KernelCall:
    """Normal weights, rounded as the builder does, so that results are as far apart as logits."""
    rng = np.random.default_rng(case.columns)
    call = linear_call(rng, case, rows)
    weight = rng.standard_normal((case.columns, case.depth)).astype(np.float32)
    return with_weight(call, weight)


def with_weight(call: KernelCall, weight: np.ndarray) -> KernelCall:
    codes, scales = GroupCodes(GROUP)(weight), GroupScales(GROUP)(weight)
    given = {"weight": stored(codes, "i8", "planes"), "weight_scale": pack_columns(scales)}
    return replace(call, inputs={**call.inputs, **given})


CALLS = [normal_call(case) for case in CASES]


@pytest.fixture(scope="module", params=available_isas())
def library(request: pytest.FixtureRequest) -> KernelLibrary:
    return compile_kernels(CALLS, request.param)


@pytest.mark.parametrize("call", CALLS, ids=[str(case) for case in CASES])
@pytest.mark.parametrize("rows", SEARCHED_ROWS)
def test_the_largest_is_where_it_was_and_the_same(
    library: KernelLibrary, call: KernelCall, rows: int
) -> None:
    call = take_rows(call, slice(2, 2 + rows))
    every = library.run(call)["out"].astype(np.float32)
    for num_threads in (1, 3):
        found = library.run(call, num_threads, only_largest=True)["out"].astype(np.float32)
        assert np.array_equal(found.argmax(axis=1), every.argmax(axis=1))
        assert np.array_equal(found.max(axis=1), every.max(axis=1))
        assert np.sqrt(np.mean((found - every) ** 2)) < 0.15 * every.std()


def test_most_of_the_fine_plane_is_not_read(library: KernelLibrary) -> None:
    """What was multiplied by both planes has the very same results as without a search."""
    call = take_rows(CALLS[0], slice(0, 1))
    same = library.run(call, only_largest=True)["out"] == library.run(call)["out"]
    panels = same[0, : COLUMNS // 16 * 16].reshape(-1, 16).all(axis=1)
    assert 1 <= panels.sum() <= len(panels) // 10


def test_more_rows_are_multiplied_by_both_planes(library: KernelLibrary) -> None:
    call = CALLS[0]
    found = library.run(call, 2, only_largest=True)["out"]
    assert found.tobytes() == library.run(call)["out"].tobytes()


def test_the_first_of_equals_is_found(library: KernelLibrary) -> None:
    """Columns that are the same have the same results, and `argmax` takes the first."""
    rng = np.random.default_rng(1)
    weight = np.tile(rng.standard_normal((COLUMNS // 10, DEPTH)).astype(np.float32), (10, 1))
    call = take_rows(with_weight(CALLS[0], weight), slice(0, 4))
    found = library.run(call, 2, only_largest=True)["out"]
    assert np.array_equal(found.argmax(axis=1), library.run(call)["out"].argmax(axis=1))
    assert (found.argmax(axis=1) < COLUMNS // 10).all()


@pytest.mark.parametrize("spread", [0.0, 3.0])
def test_weights_that_the_coarse_plane_says_little_of(
    library: KernelLibrary, spread: float
) -> None:
    """One large weight in each group leaves the others codes of one nibble, or none."""
    rng = np.random.default_rng(2)
    weight = spread / 119 * rng.standard_normal((COLUMNS, DEPTH)).astype(np.float32)
    weight[:, ::GROUP] = 1.0
    call = take_rows(with_weight(CALLS[0], weight), slice(0, 5))
    found = library.run(call, 2, only_largest=True)["out"]
    every = library.run(call)["out"]
    assert np.array_equal(found.argmax(axis=1), every.argmax(axis=1))
    assert np.array_equal(found.max(axis=1), every.max(axis=1))


def test_rows_that_hold_nan_are_seen(library: KernelLibrary) -> None:
    call = take_rows(CALLS[0], slice(0, 2))
    x = random_array(np.random.default_rng(3), 2, DEPTH)
    x[1] = np.nan
    call = replace(call, inputs={**call.inputs, "x": cast(x, "bf16")})
    found, every = (library.run(call, only_largest=b)["out"] for b in (True, False))
    assert found[0].argmax() == every[0].argmax()
    assert np.isfinite(found[1].max()) == np.isfinite(every[1].max())
