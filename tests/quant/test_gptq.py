"""GPTQ and GPTAQ against their definitions: least squares, slow loops, and what they promise."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trtc.protos.errors import CalibrationError
from trtc.quant.code_grid import E4M3, INT4, IQ4, CodeGrid
from trtc.quant.gptq import InputStatistics, round_by_scales, round_weights, search_scales
from trtc.quant.scheme import Gptq

GROUP = 32
PLAIN, ASYMMETRIC = Gptq(asymmetric=False), Gptq(asymmetric=True)
ONCE = replace(PLAIN, sweeps=0)


def correlated(tokens: int, depth: int, seed: int) -> torch.Tensor:
    """Inputs [T, K] whose channels are far from independent, some of them loud."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(depth // 4, depth, generator=generator)
    x = torch.randn(tokens, depth // 4, generator=generator) @ mix
    x += 0.3 * torch.randn(tokens, depth, generator=generator)
    return x * torch.randn(depth, generator=generator).exp()


def nearest(weight: torch.Tensor) -> torch.Tensor:
    scales = search_scales(weight, GROUP)[0].repeat_interleave(GROUP, 1)
    return (weight / scales).round().clamp(-8, 7) * scales


def statistics(x: torch.Tensor, exact: torch.Tensor | None = None) -> InputStatistics:
    return InputStatistics(x.T @ x, None if exact is None else (exact - x).T @ x)


@pytest.mark.parametrize("seed", range(3))
def test_outputs_are_closer_than_by_rounding_to_nearest(seed: int) -> None:
    torch.manual_seed(seed)
    weight, x = torch.randn(48, 128), correlated(512, 128, seed)
    found = round_weights(weight.clone(), statistics(x), GROUP, PLAIN)

    def error(rounded: torch.Tensor) -> float:
        return float((x @ (weight - rounded).T).square().mean())

    assert error(found.values()) < 0.5 * error(nearest(weight))


@pytest.mark.parametrize("seed", range(3))
def test_gptaq_makes_good_for_what_the_inputs_lost(seed: int) -> None:
    torch.manual_seed(seed)
    weight, exact = torch.randn(48, 128), correlated(512, 128, seed)
    x = exact + 0.2 * exact @ torch.randn(128, 128) / 128**0.5

    def error(settings: Gptq, inputs: InputStatistics) -> float:
        found = round_weights(weight.clone(), inputs, GROUP, settings).values()
        return float((exact @ weight.T - x @ found.T).square().mean())

    assert error(ASYMMETRIC, statistics(x, exact)) < 0.9 * error(PLAIN, statistics(x))


def defined(
    weight: torch.Tensor, x: torch.Tensor, scales: torch.Tensor, grid: CodeGrid
) -> torch.Tensor:
    """Codes by solving for the columns that are left each time, in float64 and in the order of
    power."""
    depth = weight.shape[1]
    gram = (x.T @ x).double()
    gram += torch.eye(depth) * ONCE.damping * gram.diagonal().mean()
    order = (x.T @ x).diagonal().argsort(descending=True).tolist()
    left, codes = weight.double().clone(), torch.zeros(weight.shape)
    while order:
        k, rest = order[0], order[1:]
        codes[:, k] = grid.round((left[:, k] / scales[:, k]).float())
        error = codes[:, k] * scales[:, k] - left[:, k]
        if rest:
            # The change of the others that least changes the output, given this column's.
            best = torch.linalg.solve(gram[rest][:, rest], gram[rest, k])
            left[:, rest] -= error[:, None] * best
        order = rest
    return codes


def test_columns_are_rounded_as_the_papers_define() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(8, 64), correlated(256, 64, 0)
    scales = search_scales(weight, GROUP)[0].double().repeat_interleave(GROUP, 1)
    found = round_weights(weight.clone(), statistics(x), GROUP, ONCE)
    same = (found.codes == defined(weight, x, scales, INT4)).double().mean()
    assert same > 0.99  # f32 may tip a tie, and what follows it


def test_columns_of_rows_with_scales_are_rounded_as_the_papers_define() -> None:
    """Codes of E4M3; the last block is narrower, and one channel has no inputs."""
    torch.manual_seed(0)
    weight, x = torch.randn(8, 200), correlated(512, 200, 0)
    x[:, 7] = 0
    scales = weight.abs().amax(1, keepdim=True) / 448
    given = scales.clone()
    found = round_by_scales(weight.clone(), statistics(x), given, ONCE, E4M3)
    assert torch.equal(given, scales)
    wanted = defined(weight, x, scales.double().expand(8, 200), E4M3)
    assert (found == wanted).double().mean() > 0.99  # f32 may tip a tie, and what follows it
    better = round_by_scales(weight.clone(), statistics(x), given, PLAIN, E4M3)
    for codes in (found, better):
        assert torch.equal(codes[:, 7], E4M3.round(weight[:, 7] / scales[:, 0]))
    nearest = E4M3.round(weight / scales)
    errors = [
        float((x @ (weight - codes * scales).T).square().mean())
        for codes in (better, found, nearest)
    ]
    assert errors[0] < 0.9 * errors[1] < 0.5 * errors[2]


def test_gptaq_rounds_the_weights_that_would_be_best() -> None:
    """Those of least squares, in float64: as plain GPTQ would round them with the same scales."""
    torch.manual_seed(0)
    weight, exact = torch.randn(8, 64), correlated(256, 64, 0)
    x = exact + 0.2 * exact @ torch.randn(64, 64) / 8
    settings = replace(ASYMMETRIC, sweeps=0, correction=1.0)
    gram = (x.T @ x).double()
    gram += torch.eye(64) * settings.damping * gram.diagonal().mean()
    best = weight + weight.double() @ ((exact - x).T @ x).double() @ torch.linalg.inv(gram)
    order = (x.T @ x).diagonal().argsort(descending=True)
    steps = search_scales(weight, GROUP)[0].double().repeat_interleave(GROUP, 1)[:, order]
    upper = torch.linalg.cholesky(torch.linalg.inv(gram[order][:, order]), upper=True)
    left, codes = best[:, order].clone(), torch.zeros(8, 64)
    for k in range(64):
        codes[:, order[k]] = (left[:, k] / steps[:, k]).round().clamp(-8, 7).float()
        error = left[:, k] - codes[:, order[k]] * steps[:, k]
        left[:, k:] -= error[:, None] / upper[k, k] * upper[k, k:]
    found = round_weights(weight.clone(), statistics(x, exact), GROUP, settings)
    assert (found.codes == codes).double().mean() > 0.99  # f32 may tip a tie, and what follows it


@pytest.mark.parametrize("grid", [INT4, IQ4], ids=["int4", "iq4"])
@pytest.mark.parametrize("settings", [PLAIN, ASYMMETRIC], ids=["gptq", "gptaq"])
def test_descent_brings_outputs_closer(settings: Gptq, grid: CodeGrid) -> None:
    torch.manual_seed(0)
    weight, exact = torch.randn(48, 128), correlated(512, 128, 0)
    x = exact + 0.2 * exact @ torch.randn(128, 128) / 128**0.5
    settings = replace(settings, correction=1.0)

    def error(sweeps: int) -> float:
        inputs = statistics(x, exact if settings.asymmetric else None)
        found = round_weights(
            weight.clone(), inputs, GROUP, replace(settings, sweeps=sweeps), grid
        ).values()
        wanted = exact if settings.asymmetric else x
        return float((wanted @ weight.T - x @ found.T).square().mean())

    assert error(3) < error(0)


def test_scales_are_the_same_however_many_are_searched_for_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    weight = torch.randn(24, 4 * GROUP)
    for grid in (INT4, IQ4):
        for by_row in (False, True):
            whole, unit = search_scales(weight, GROUP, grid, by_row=by_row)
            with monkeypatch.context() as context:
                context.setattr("trtc.quant.torch_steps._SEARCHED_AT_ONCE", 5 * weight.shape[1])
                parts, same = search_scales(weight, GROUP, grid, by_row=by_row)
            assert torch.equal(parts, whole) and torch.equal(same, unit)


def test_more_damping_is_taken_where_products_cannot_be_inverted() -> None:
    """A correlation of 1.5, which only a damping of more than half the mean makes positive."""
    x = torch.full((1, 64), 1e4)
    gram = x.T @ x
    gram[0, 1] = gram[1, 0] = gram[0, 0] * 1.5
    found = round_weights(torch.randn(4, 64), InputStatistics(gram), GROUP, PLAIN)
    assert bool(found.values().isfinite().all())


def test_equal_inputs_need_no_correction() -> None:
    torch.manual_seed(1)
    weight, x = torch.randn(16, 256), correlated(512, 256, 1)
    asymmetric = round_weights(weight.clone(), statistics(x, x), GROUP, ASYMMETRIC)
    plain = round_weights(weight.clone(), statistics(x), GROUP, PLAIN)
    assert torch.equal(asymmetric.codes, plain.codes)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), magnitude=st.sampled_from([1e-6, 1.0, 1e4]))
def test_scales(seed: int, magnitude: float) -> None:
    """Of bf16's precision, of the sign that lets the largest weight reach -8, never zero."""
    weight = torch.from_numpy(np.random.default_rng(seed).standard_normal((4, 2 * GROUP)))
    weight = weight.float() * magnitude
    scales, _ = search_scales(weight, GROUP)
    assert scales.shape == (4, 2) and torch.equal(scales, scales.bfloat16().float())
    groups = weight.reshape(4, 2, GROUP)
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)).squeeze(-1)
    assert torch.equal(scales.sign(), -largest.sign())
    for share in (0.55, 1.1):
        given_scale = (largest / -8 * share).bfloat16().float()
        assert bool((squares(weight, scales) <= squares(weight, given_scale)).all())


def test_searched_scales_beat_the_largest_weight_at_seven() -> None:
    torch.manual_seed(0)
    weight = torch.randn(256, 4 * GROUP)
    usual = weight.reshape(256, 4, GROUP).abs().amax(-1) / 7
    assert (
        squares(weight, search_scales(weight, GROUP)[0]).sum() < 0.85 * squares(weight, usual).sum()
    )


def squares(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The squared error of each group [N, G] that is rounded to nearest."""
    groups, scales = weight.reshape(*scales.shape, GROUP), scales[..., None]
    codes = (groups / scales).round().clamp(-8, 7)
    return (codes * scales - groups).square().sum(-1)


def test_channels_that_are_always_zero_and_weights_that_are() -> None:
    weight, x = torch.randn(8, 64), correlated(128, 64, 2)
    x[:, 5] = 0
    weight[3] = 0
    found = round_weights(weight.clone(), statistics(x), GROUP, PLAIN)
    assert bool(found.values().isfinite().all())
    assert not found.codes[:, 5].any() and not found.codes[3].any()
    assert bool((found.scales != 0).all())


def test_few_tokens_are_enough_to_go_on() -> None:
    weight, x = torch.randn(8, 64), correlated(3, 64, 3)
    found = round_weights(weight.clone(), statistics(x), GROUP, PLAIN)
    assert bool(found.values().isfinite().all())


def test_activations_that_are_not_finite_are_refused() -> None:
    x = correlated(16, 64, 4)
    x[0, 0] = torch.nan
    with pytest.raises(CalibrationError, match="not finite"):
        round_weights(torch.randn(8, 64), statistics(x), GROUP, PLAIN)
