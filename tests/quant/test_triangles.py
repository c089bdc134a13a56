"""Products by panels against whole ones in float64."""

import pytest
import torch

from trtc.quant.triangles import add_lower_gram, complete_gram, invert_lower, multiply_by_transposed


@pytest.fixture(autouse=True)
def small_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtc.quant.triangles._PANEL", 8)
    torch.manual_seed(0)


@pytest.mark.parametrize("depth", [5, 8, 21])
def test_a_gram_is_symmetric_and_the_sum_of_all_products(depth: int) -> None:
    first, second = torch.randn(7, depth), torch.randn(4, depth)
    total = torch.zeros(depth, depth)
    add_lower_gram(total, first)
    add_lower_gram(total, second)
    complete_gram(total)
    x = torch.cat((first, second)).double()
    torch.testing.assert_close(total.double(), x.T @ x, rtol=1e-5, atol=1e-5)
    assert torch.equal(total[8:, :8], total[:8, 8:].T)


@pytest.mark.parametrize("depth", [5, 8, 21])
def test_a_triangle_times_its_inverse_is_one(depth: int) -> None:
    lower = torch.randn(depth, depth).tril_()
    lower.diagonal().abs_().add_(2)
    for inverse in (lower.clone(), lower.T.contiguous().T):
        invert_lower(inverse)
        one = lower.double() @ inverse.double()
        torch.testing.assert_close(one, torch.eye(depth).double(), rtol=0, atol=1e-5)
        assert torch.equal(inverse, inverse.tril())


@pytest.mark.parametrize("depth", [5, 8, 21])
def test_a_product_with_a_transposed_triangle(depth: int) -> None:
    left, upper = torch.randn(6, depth), torch.randn(depth, depth).triu_()
    wanted = left.double() @ upper.double().T
    multiply_by_transposed(left, upper)
    torch.testing.assert_close(left.double(), wanted, rtol=1e-5, atol=1e-5)
