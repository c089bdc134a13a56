"""Log-probabilities, and divergences by them, on the device that computes the logits.

All is in float64, some rows at a time. On a CPU it is what quant/accuracy.py computes, bit for bit:
NumPy takes half the time of PyTorch there.
"""

import torch

from trtc.quant.accuracy import kl_divergence, log_softmax, row_chunks


def log_probabilities(logits: torch.Tensor) -> torch.Tensor:
    """Of each row of logits [rows, vocab_size], f64 on their device."""
    found = torch.empty_like(logits, dtype=torch.float64)
    for rows in row_chunks(*logits.shape):
        found[rows] = _log_softmax(logits[rows])
    return found


def divergences(log_p: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """KL(p || q) of each row, in nats: f64 [rows] on the device.

    Args:
        log_p: `log_probabilities` of p [rows, vocab_size].
        logits: of q, likewise.
    """
    found = log_p.new_empty(len(log_p))
    for rows in row_chunks(*logits.shape):
        found[rows] = _kl_divergence(log_p[rows], _log_softmax(logits[rows]))
    return found


def _log_softmax(logits: torch.Tensor) -> torch.Tensor:
    if logits.device.type == "cpu":
        return torch.from_numpy(log_softmax(logits.float().numpy()))
    return torch.log_softmax(logits.double(), -1)


def _kl_divergence(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    if log_p.device.type == "cpu":
        return torch.from_numpy(kl_divergence(log_p.numpy(), log_q.numpy()))
    # Where p is 0, log q may be infinite as well.
    p = log_p.exp()
    return torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1)
