"""The steps of rounding as kernels against PyTorch: interpreted, compiled, and on a GPU."""

from collections.abc import Callable
from unittest import mock

import pytest
import torch

from tests.support.compiled import compile_sources
from tests.support.rounding_cases import (
    CASES,
    Outcome,
    correlated,
    descended,
    problem,
    rounded,
    weights,
)
from tests.support.torch_gpu import needs_torch_gpu
from tests.support.triton_kernels import in_interpreter, needs_triton
from trtc.plugins.gpu.arch import ARCHS
from trtc.quant.block_steps import BLOCK, BlockSteps
from trtc.quant.code_grid import E4M3, GRIDS, CodeGrid
from trtc.quant.gptq import InputStatistics, Rounded, round_weights
from trtc.quant.scheme import Gptq
from trtc.quant.torch_steps import TorchSteps

needs_triton()

from trtc.quant import triton_steps  # noqa: E402
from trtc.quant.triton_steps import TritonSteps  # noqa: E402

DEVICES = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], ids=["interpreted", "gpu"]
)
BLOCKS = pytest.mark.parametrize("name", CASES)


def on(device, work, *arguments):
    """Call `work` with them and the device: on the CPU where Triton interprets its kernels."""
    if device == "cpu":
        return in_interpreter(work, *arguments, device)
    needs_torch_gpu()
    return work(*arguments, device)


def assert_alike(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """But for ties that another order of sums tips, and what follows them."""
    assert (found == wanted).double().mean() > 0.99


def by_kernel(step: Callable[..., Outcome], name: str, device: str) -> Outcome:
    steps = TritonSteps(CASES[name].grid, torch.device(device))
    return step(steps, problem(CASES[name], device)).cpu()


@DEVICES
@BLOCKS
def test_columns_are_rounded_as_pytorch_rounds_them(name: str, device: str) -> None:
    given = problem(CASES[name])
    found = on(device, by_kernel, rounded, name)
    wanted = rounded(TorchSteps(given.case.grid), given)
    assert_alike(found.codes, wanted.codes)
    lost, least = (float(one.rest.double().square().sum()) for one in (found, wanted))
    assert lost == pytest.approx(least, rel=1e-4)


@DEVICES
@BLOCKS
def test_descent_decides_as_pytorch_does(name: str, device: str) -> None:
    given = problem(CASES[name])
    found = on(device, by_kernel, descended, name)
    wanted = descended(TorchSteps(given.case.grid), given)
    assert_alike(found.codes, wanted.codes)
    assert_alike(found.scales, wanted.scales)
    after = given.error(found.codes, found.scales)
    assert after == pytest.approx(given.error(wanted.codes, wanted.scales), rel=1e-4)
    assert after < given.error(given.nearest(), given.scales)
    before = given.values(given.nearest(), given.scales)
    change = before - given.values(found.codes, found.scales)
    torch.testing.assert_close(found.rest, change[:, given.block], rtol=1e-5, atol=1e-5)
    assert torch.equal(given.case.grid.round_scales(found.scales, given.unit), found.scales)


def searched(steps: BlockSteps, grid: CodeGrid, groups: torch.Tensor) -> torch.Tensor:
    widest = groups.abs().amax(-1, keepdim=True) / grid.numbers[0]
    unit = grid.scale_unit(widest, by_row=True)
    return steps.best_scales(groups, torch.where(widest == 0, unit, widest), unit)


def searched_by_kernel(name: str, groups: torch.Tensor, device: str) -> torch.Tensor:
    steps = TritonSteps(GRIDS[name], torch.device(device))
    return searched(steps, GRIDS[name], groups.to(device)).cpu()


@DEVICES
@pytest.mark.parametrize("group_size", [16, 128])
@pytest.mark.parametrize("name", GRIDS)
def test_scales_are_those_that_pytorch_finds(name: str, group_size: int, device: str) -> None:
    grid, groups = GRIDS[name], weights(9, 5 * group_size, 0).reshape(9, 5, group_size)
    found = on(device, searched_by_kernel, name, groups)
    wanted = searched(TorchSteps(grid), grid, groups)
    assert_alike(found, wanted)
    lost, least = (
        (grid.round(groups / scales) * scales - groups).square().sum(-1)
        for scales in (found, wanted)
    )
    assert bool((lost <= least * (1 + 1e-5)).all())


SETTINGS = Gptq(asymmetric=True, sweeps=1)
ROWS, DEPTH, GROUP_SIZE = 5, 160, 32


def statistics() -> InputStatistics:
    exact = correlated(512, DEPTH, 1)
    x = exact + 0.02 * exact.roll(1, 0)
    return InputStatistics(x.T @ x, (exact - x).T @ x)


def round_by_kernels(name: str, device: str) -> Rounded:
    """Of a weight whose last block is narrower."""
    given = statistics()
    assert given.shift is not None
    inputs = InputStatistics(given.gram.to(device), given.shift.to(device))
    places = ("trtc.quant.gptq.steps_on", "trtc.quant.descent.steps_on")
    made = [
        mock.patch(place, side_effect=lambda at, grid: TritonSteps(grid, at)) for place in places
    ]
    with made[0] as first, made[1] as second:
        weight = weights(ROWS, DEPTH, 1).to(device)
        found = round_weights(weight, inputs, GROUP_SIZE, SETTINGS, GRIDS[name])
    assert first.called and second.called
    return found.on_cpu()


@DEVICES
@pytest.mark.parametrize("name", GRIDS)
def test_weights_are_rounded_as_well_as_by_pytorch(name: str, device: str) -> None:
    """By all steps, one after the other."""
    found = on(device, round_by_kernels, name)
    weight, given = weights(ROWS, DEPTH, 1), statistics()
    wanted = round_weights(weight.clone(), statistics(), GROUP_SIZE, SETTINGS, GRIDS[name])
    assert_alike(found.codes, wanted.codes)
    lost, least = (
        float(((off := (weight - one.values()).double()) @ given.gram.double() * off).sum())
        for one in (found, wanted)
    )
    assert lost == pytest.approx(least, rel=1e-4)
    assert bool(found.values().isfinite().all())


def test_kernels_compile() -> None:
    sources = [
        make(GRIDS[name], *sizes)
        for name, group_size in (("i4", 128), ("iq4", 16))
        for make, sizes in (
            (triton_steps.best_scales, (group_size,)),
            (triton_steps.round_block, ()),
            (triton_steps.descend_block, (group_size,)),
        )
    ]
    sources += [
        triton_steps.round_block(E4M3),
        triton_steps.descend_block(E4M3, BLOCK, fit_scales=False),
    ]
    for kernel in compile_sources(sources, 90):
        assert kernel.cubin.startswith(b"\x7fELF")
        assert kernel.shared_bytes <= ARCHS[90].shared_bytes
        assert ".local" not in kernel.ptx.decode(), "indexes registers"
