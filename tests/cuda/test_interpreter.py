"""Triton's interpreter as tests/support/triton_kernels.py has it."""

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
