"""A router of experts as standard ONNX: what plugins/moe/routing.py defines, densely."""

from typing import Any

from trtc.builder.passes.matching import Node, Tensor, input_of, site_of
from trtc.builder.passes.rewriter import Rewriter
from trtc.builder.passes.standard_nodes import StandardNodes
from trtc.plugins.moe.op import MOE

_FAR = 1e9
"""Farther than two scores with their biases can be from each other."""


def expert_weights(rewriter: Rewriter, moe: Node, logits: Tensor) -> Tensor:
    """The weight of each expert for each row, [E, T, 1] f32: zero for those not chosen."""
    return _Router(rewriter, moe, logits).weights()


class _Router(StandardNodes):
    def __init__(self, rewriter: Rewriter, moe: Node, logits: Tensor) -> None:
        super().__init__(rewriter, f"{site_of(moe)}.router")
        self._moe = moe
        self._logits = logits
        self._rows, self._experts = logits.shape
        self._routing: dict[str, Any] = MOE.complete_attributes(moe.attrs)

    def weights(self) -> Tensor:
        every = [self._rows, self._experts]
        if self._routing["score"] == "sparsemixer":
            indices, weights = self._one_after_another()
        else:
            indices, weights = self._by_scores()
        weights = self._scaled(weights)
        zeros = self.make("Sub", "zeros", [self._logits, self._logits], "f32", every)
        dense = self.make(
            "ScatterElements", "dense", [zeros, indices, weights], "f32", every, axis=1
        )
        scale = input_of(self._moe, "expert_scale")
        if scale is not None:
            dense = self.make("Mul", "scaled_experts", [dense, scale], "f32", every)
        turned = self.make("Transpose", "turned", [dense], "f32", every[::-1], perm=[1, 0])
        return self.make("Unsqueeze", "weights", [turned, self.axes(2)], "f32", [*every[::-1], 1])

    def _by_scores(self) -> tuple[Tensor, Tensor]:
        """The experts of each row and their scores, [T, k]."""
        chosen = [self._rows, self._routing["top_k"]]
        scores = self._scores()
        _, indices = self.top("top", self._ranks(scores), chosen)
        return indices, self.make(
            "GatherElements", "chosen", [scores, indices], "f32", chosen, axis=1
        )

    def _one_after_another(self) -> tuple[Tensor, Tensor]:
        """The same by SparseMixer."""
        one, every = [self._rows, 1], [self._rows, self._experts]
        sizes = self.make("Abs", "sizes", [self._logits], "f32", every)
        margin, far = self.number("margin", self._routing["margin"]), self.number("far", -_FAR)
        left, experts, weights = self._logits, [], []
        for rank in range(self._routing["top_k"]):
            largest, index = self.top(f"best_{rank}", left, one)
            near = self._near(rank, left, largest, sizes, margin)
            total = self.make("ReduceSum", f"near_{rank}", [near, self.axes(1)], "f32", one)
            weights.append(self.make("Reciprocal", f"weight_{rank}", [total], "f32", one))
            experts.append(index)
            gone = self.make("Add", f"gone_{rank}", [largest, far], "f32", one)
            inputs = [left, index, gone]
            left = self.make("ScatterElements", f"left_{rank}", inputs, "f32", every, axis=1)
        chosen = [self._rows, len(experts)]
        return (
            self.make("Concat", "experts", experts, "i64", chosen, axis=1),
            self.make("Concat", "chosen", weights, "f32", chosen, axis=1),
        )

    def _near(
        self, rank: int, left: Tensor, largest: Tensor, sizes: Tensor, margin: Tensor
    ) -> Tensor:
        """exp(left - largest) of logits that are near the largest, else 0."""
        every = [self._rows, self._experts]
        bound = self.make("Max", f"larger_{rank}", [sizes, largest], "f32", every)
        bound = self.make("Mul", f"bound_{rank}", [bound, margin], "f32", every)
        gap = self.make("Sub", f"gap_{rank}", [largest, left], "f32", every)
        is_far = self.make("Greater", f"is_far_{rank}", [gap, bound], "bool", every)
        shares = self.make("Neg", f"below_{rank}", [gap], "f32", every)
        shares = self.make("Exp", f"shares_{rank}", [shares], "f32", every)
        inputs = [is_far, self.number("none", 0.0), shares]
        return self.make("Where", f"shares_near_{rank}", inputs, "f32", every)

    def _scores(self) -> Tensor:
        every = [self._rows, self._experts]
        if self._routing["score"] == "sigmoid":
            return self.make("Sigmoid", "sigmoid", [self._logits], "f32", every)
        return self.make("Softmax", "softmax", [self._logits], "f32", every, axis=1)

    def _scaled(self, weights: Tensor) -> Tensor:
        shape, one = list(weights.shape), [self._rows, 1]
        if self._routing["renormalize"]:
            total = self.make("ReduceSum", "total", [weights, self.axes(1)], "f32", one)
            if epsilon := self._routing["epsilon"]:
                total = self.make(
                    "Add", "divisor", [total, self.number("epsilon", epsilon)], "f32", one
                )
            weights = self.make("Div", "shares", [weights, total], "f32", shape)
        if (scale := self._routing["scale"]) != 1.0:
            weights = self.make(
                "Mul", "scaled", [weights, self.number("scale", scale)], "f32", shape
            )
        return weights

    def _ranks(self, scores: Tensor) -> Tensor:
        """What experts are chosen by, [T, E]."""
        bias = input_of(self._moe, "choice_bias")
        if bias is not None:
            ranks = self.make("Add", "biased", [scores, bias], "f32", [self._rows, self._experts])
            return self._in_open_groups(ranks)
        return self._logits if self._routing["num_groups"] == 1 else self._in_open_groups(scores)

    def _in_open_groups(self, ranks: Tensor) -> Tensor:
        """Very low outside of each row's best groups."""
        groups = self._routing["num_groups"]
        if groups == 1:
            return ranks
        every = [self._rows, self._experts]
        by_group = [self._rows, groups, self._experts // groups]
        grouped = self.reshape("groups", ranks, by_group)
        closed = self._closed(self._of_groups(grouped))
        closed = self.make("Unsqueeze", "closed", [closed, self.axes(2)], "f32", [*by_group[:2], 1])
        left = self.make("Add", "open_groups", [grouped, closed], "f32", by_group)
        return self.reshape("ranks", left, every)

    def _of_groups(self, grouped: Tensor) -> Tensor:
        """What groups are chosen by, [T, G]."""
        shape = list(grouped.shape[:2])
        best = 1 if self._routing["group_score"] == "max" else 2
        highest, _ = self.top("group_highest", grouped, [*shape, best])
        inputs = [highest, self.axes(2)]
        return self.make("ReduceSum", "group_scores", inputs, "f32", shape, keepdims=0)

    def _closed(self, of_groups: Tensor) -> Tensor:
        """Zero for the best groups, and for the others less than any score, [T, G]."""
        shape, chosen = list(of_groups.shape), [self._rows, self._routing["top_groups"]]
        best, indices = self.top("top_groups", of_groups, chosen)
        zeros = self.make("Sub", "group_zeros", [of_groups, of_groups], "f32", shape)
        low = self.make("Sub", "group_low", [zeros, self.number("far", _FAR)], "f32", shape)
        opened = self.make("Sub", "open_zeros", [best, best], "f32", chosen)
        return self.make(
            "ScatterElements", "group_open", [low, indices, opened], "f32", shape, axis=1
        )
