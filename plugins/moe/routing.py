"""Which experts each row goes to, and with what weights: the definition of all routers."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtc.plugins.activations import sigmoid

Array = NDArray[Any]


@dataclass(frozen=True)
class Routing:
    """Attributes of trtc.moe; builder/spec.py's RouterSpec describes them."""

    top_k: int
    score: str = "softmax"
    margin: float = 0.0
    num_groups: int = 1
    top_groups: int = 1
    group_score: str = "top2_sum"
    renormalize: bool = True
    epsilon: float = 0.0
    scale: float = 1.0


def route(
    router_logits: Array,
    choice_bias: Array | None,
    routing: Routing,
    expert_scale: Array | None = None,
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The top_k experts of each row, the one that ranks first in front (ties: lower index), and
    their weights.

    Args:
        router_logits: [M, E].
        choice_bias: [E], or None.
        expert_scale: [E], multiplies the weights in the end.
    """
    logits = router_logits.astype(np.float32)
    if routing.score == "sparsemixer":
        experts, weights = _one_after_another(logits, routing)
    else:
        scores = sigmoid(logits) if routing.score == "sigmoid" else _softmax(logits)
        ranks = _ranks(logits, scores, choice_bias, routing)
        experts = np.argsort(-ranks, axis=1, kind="stable")[:, : routing.top_k]
        weights = np.take_along_axis(scores, experts, axis=1)
    if routing.renormalize:
        weights = weights / (weights.sum(axis=1, keepdims=True) + np.float32(routing.epsilon))
    weights = (weights * np.float32(routing.scale)).astype(np.float32)
    return experts, weights if expert_scale is None else weights * expert_scale[experts]


def _one_after_another(
    logits: Array, routing: Routing
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """SparseMixer (arXiv:2409.12136): the likeliest expert that is left, by its softmax among those
    left whose logits l are near its own m, m - l <= margin * max(|l|, m)."""
    left = logits.copy()
    experts, weights = [], []
    for _ in range(routing.top_k):
        best = left.argmax(axis=1)[:, None]
        largest = np.take_along_axis(left, best, axis=1)
        bound = np.float32(routing.margin) * np.maximum(np.abs(logits), largest)
        near = np.where(largest - left <= bound, np.exp(left - largest), np.float32(0))
        experts.append(best)
        weights.append(1 / near.sum(axis=1, keepdims=True))
        np.put_along_axis(left, best, -np.inf, axis=1)
    return np.concatenate(experts, axis=1), np.concatenate(weights, axis=1)


def _ranks(logits: Array, scores: Array, choice_bias: Array | None, routing: Routing) -> Array:
    """What experts are chosen by; -inf outside of the chosen groups.

    Logits rank as their scores do, and still differ where those are rounded to one.
    """
    if routing.num_groups == 1:
        return logits if choice_bias is None else scores + choice_bias
    biased = scores if choice_bias is None else scores + choice_bias
    groups = biased.reshape(len(biased), routing.num_groups, -1)
    highest = -np.sort(-groups, axis=2)
    of_groups = highest[:, :, : 1 if routing.group_score == "max" else 2].sum(axis=2)
    best = np.argsort(-of_groups, axis=1, kind="stable")[:, : routing.top_groups]
    is_open = np.zeros(of_groups.shape, bool)
    np.put_along_axis(is_open, best, True, axis=1)
    return np.where(is_open[:, :, None], groups, -np.inf).reshape(biased.shape)


def _softmax(logits: Array) -> Array:
    exponents = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(exponents / exponents.sum(axis=1, keepdims=True))
