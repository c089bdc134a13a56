"""Triton's interpreter as tests/support/triton_kernels.py has it."""

import numpy as np
import pytest
import torch

from tests.support.triton_kernels import in_interpreter, needs_triton

needs_triton()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402


@triton.jit
def nearly_square(out, x):
    tl.store(out, (tl.load(x) + 1) * (tl.load(x) - 1))


def outcome(number: int) -> str:
    """What the kernel gives for a 32-bit integer, or why it ends."""
    x = torch.tensor([number], dtype=torch.int32)
    out = torch.zeros_like(x)
    try:
        nearly_square[(1,)](out, x)
    except Exception as error:  # noqa: BLE001 (of the interpreter's own kinds)
        return str(error)
    return str(int(out))


def test_an_integer_that_leaves_its_type_ends_the_kernel() -> None:
    assert in_interpreter(outcome, 46_340) == str(46_340**2 - 1)
    assert "int32 overflow of mul" in in_interpreter(outcome, 46_342)
    assert "int32 overflow of add" in in_interpreter(outcome, 2**31 - 1)
    assert "int32 overflow of sub" in in_interpreter(outcome, -(2**31))


@triton.jit
def of_pairs(out, x, y, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A block of all pairs from two that are broadcast, and sums of its rows."""
    rows, columns = 0 + tl.arange(0, ROWS), tl.arange(0, COLUMNS) * 1
    left, right = tl.load(x + rows)[:, None], tl.load(y + columns)[None, :]
    pairs = tl.where(left < right, 2 * left - right, right / 4.0)
    at = rows[:, None] * (COLUMNS + 1) + columns[None, :]
    tl.store(out + at, pairs)
    tl.store(out + rows * (COLUMNS + 1) + COLUMNS, tl.sum(pairs + tl.sum(left), 1))


def pairs(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    out = torch.full((len(left), len(right) + 1), torch.nan)
    of_pairs[(1,)](out, torch.from_numpy(left), torch.from_numpy(right), len(left), len(right))
    return out.numpy()


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 8), (4, 1), (4, 8)])
def test_operands_have_the_shape_of_both(rows: int, columns: int) -> None:
    rng = np.random.default_rng(rows + columns)
    left, right = (rng.integers(0, 64, n).astype(np.float32) for n in (rows, columns))
    expected = np.where(left[:, None] < right, 2 * left[:, None] - right, right / 4)
    sums = (expected + left.sum()).sum(axis=1, keepdims=True)
    found = in_interpreter(pairs, left, right)
    np.testing.assert_array_equal(found, np.concatenate((expected, sums), axis=1))
