"""Divergences of rows of logits, against NumPy's of all rows at once."""

import numpy as np
import pytest
import torch

from tests.support.torch_gpu import needs_torch_gpu
from trtc.quant.accuracy import kl_divergence, log_softmax
from trtc.quant.logit_divergence import divergences, log_probabilities

ROWS, VOCAB_SIZE = 11, 300


def logits(seed: int) -> torch.Tensor:
    """bf16; one token is ruled out, and the last row is certain."""
    found = 4 * torch.randn(ROWS, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))
    found[:, 17] = -torch.inf
    found[-1, 5] = 1e4
    return found.bfloat16()


@pytest.fixture(autouse=True)
def _four_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtc.quant.accuracy._CHUNK_ELEMENTS", 4 * VOCAB_SIZE)


def test_on_a_cpu_they_are_those_of_all_rows_bit_for_bit() -> None:
    p, q = logits(1), logits(2)
    log_p = log_softmax(p.float().numpy())
    np.testing.assert_array_equal(log_probabilities(p).numpy(), log_p)
    wanted = kl_divergence(log_p, log_softmax(q.float().numpy()))
    assert wanted[-1] < 1e-6 < wanted[0]
    np.testing.assert_array_equal(divergences(log_probabilities(p), q).numpy(), wanted)


@pytest.mark.gpu
def test_on_a_gpu_they_are_those_of_a_cpu() -> None:
    needs_torch_gpu()
    p, q = logits(1), logits(2)
    log_p = log_probabilities(p.cuda())
    assert log_p.is_cuda and log_p.dtype == torch.float64
    torch.testing.assert_close(log_p.cpu(), log_probabilities(p), rtol=1e-12, atol=1e-12)
    found, wanted = divergences(log_p, q.cuda()), divergences(log_probabilities(p), q)
    assert found.is_cuda
    torch.testing.assert_close(found.cpu(), wanted, rtol=1e-12, atol=1e-12)
    assert torch.equal(divergences(log_p, q.cuda()), found)
