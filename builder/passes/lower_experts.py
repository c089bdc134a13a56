"""Routed experts as standard ONNX for TensorRT: every expert on every row, weighted by the router.

    moe(x, router_logits) -> sum over e of weight[e] * down[e](act(gate[e](x)) * up[e](x))

as matrix products batched over the experts [E, T, ...], where `weight` is zero for experts that a
row did not choose. Shapes follow from T alone, so nothing waits for the router and steps can be
captured; the price is that every expert multiplies every row.

Weights of 4 bits are dequantised in their blocks as [E, N, K]; weights with a scale a row as
[E * N, K], because DequantizeLinear has scales along one axis. Static scales of activations differ
from expert to expert and TensorRT takes one for a tensor: the quotient is quantised by a scale of
one, and the scale goes to the weight's.
"""

from dataclasses import dataclass

import numpy as np

from trtc.builder.graph_writer import onnx_type
from trtc.builder.passes.base import Rewrite
from trtc.builder.passes.matching import Node, Tensor, input_of, site_of
from trtc.builder.passes.rewriter import Rewriter
from trtc.builder.passes.standard_nodes import StandardNodes
from trtc.builder.passes.standard_routing import expert_weights
from trtc.builder.recipes import Array
from trtc.protos.errors import UnsupportedError


def lower_experts(rewriter: Rewriter) -> bool:
    """Lower every moe node of the source graph: row-major weights, no zero points, no biases, no
    residual, no shared expert in it, nothing clamped."""
    nodes = list(rewriter.fused_nodes("moe"))
    for node in nodes:
        _Experts(rewriter, node).lower()
    return bool(nodes)


def _check_experts(node: Node) -> None:
    """Refuse experts as of gpt-oss and Nemotron-3.

    Raises:
        UnsupportedError: they have biases, are clamped or shifted, have no gate, or read their
            input in orders of their own.
    """
    if input_of(node, "gate_up_order") is not None:
        raise UnsupportedError(
            "has experts with scattered groups (act-order), which trtc does not lower for TensorRT",
            field=node.name,
            remedy="Build with --target cpu, or cuda:sm_90 and others",
        )
    if node.attrs.get("parts") == 1:
        raise UnsupportedError(
            "has experts without a gate, which trtc does not lower for TensorRT",
            field=node.name,
            remedy="Build with --target cpu, or cuda:sm_90 and others",
        )
    biases = (input_of(node, name) for name in ("gate_up_bias", "down_bias"))
    shaped = node.attrs.get("limit") or node.attrs.get("up_offset")
    if shaped or any(bias is not None for bias in biases):
        raise UnsupportedError(
            "has biases or limits, which trtc does not lower for TensorRT",
            field=node.name,
            remedy="Build with --target cpu, or cuda:sm_90 and others",
        )


class _Experts(StandardNodes):
    """One moe node on its way to standard operators."""

    def __init__(self, rewriter: Rewriter, node: Node) -> None:
        for absent in ("gate_up_zero", "down_zero", "gate_up_scale_unit", "residual", "shared"):
            assert input_of(node, absent) is None, f"{node.name} has {absent}"
        _check_experts(node)
        super().__init__(rewriter, site_of(node))
        self._node = node
        self._dtype = str(node.attrs["out_dtype"])
        self._num_rows = node.inputs[0].shape[0]
        self._num_experts, _, self._hidden = (int(n) for n in node.inputs[2].shape)

    def lower(self) -> None:
        x, logits = self._node.inputs[:2]
        row = [1, self._num_rows, self._hidden]
        stacked = self.make("Unsqueeze", "experts.x", [x, self.axes(0)], self._dtype, row)
        weights = expert_weights(self.rewriter, self._node, logits)
        if self._node.attrs.get("weighs_inputs"):
            # Rows are zero for experts that they did not choose, and so is what these give.
            down = self._mlp(self._weighted(stacked, weights))
            self._sum(self.cast("experts.out_f32", down, "f32"))
            return
        wide = self.cast("experts.out_f32", self._mlp(stacked), "f32")
        shape = self._batched(self._hidden)
        self._sum(self.make("Mul", "experts.weighted", [wide, weights], "f32", shape))

    def _mlp(self, x: Tensor) -> Tensor:
        return self._linear("down", self._gated(self._linear("gate_up", x)))

    def _weighted(self, x: Tensor, weights: Tensor) -> Tensor:
        """[E, T, H], rounded to the activation type."""
        wide = self.cast("experts.x_f32", x, "f32")
        shape = self._batched(self._hidden)
        weighted = self.make("Mul", "experts.weighted_x", [wide, weights], "f32", shape)
        return self.cast("experts.given", weighted, self._dtype)

    def _linear(self, which: str, x: Tensor) -> Tensor:
        """x [1 or E, T, K] by the experts' weights [E, N, K] -> [E, T, N]."""
        weight = input_of(self._node, which)
        assert weight is not None, f"{self._node.name} lacks {which}"
        scale, input_scale, pre_scale = (
            input_of(self._node, f"{which}_{part}")
            for part in ("scale", "input_scale", "pre_scale")
        )
        experts, n, k = (int(extent) for extent in weight.shape)
        if pre_scale is not None:
            factors = self.rewriter.reshaped(f"{pre_scale.name}.rows", pre_scale, (experts, 1, k))
            factors = self.rewriter.as_type(factors, self._dtype)
            x = self.make(
                "Mul", f"experts.{which}.pre_scale", [x, factors], self._dtype, self._batched(k)
            )
        if input_scale is not None:
            x = self._quantized(which, x, input_scale, k)
        turned = self.make(
            "Transpose",
            f"experts.{which}.transpose",
            [self._dequantized(which, weight, scale, input_scale)],
            self._dtype,
            [experts, k, n],
            perm=[0, 2, 1],
        )
        return self.make(
            "MatMul", f"experts.{which}.matmul", [x, turned], self._dtype, self._batched(n)
        )

    def _quantized(self, which: str, x: Tensor, scale: Tensor, k: int) -> Tensor:
        """x in units of each expert's scale, rounded to codes."""
        name = f"experts.{which}.input"
        code, shape = str(self._node.attrs["act_quant"]), self._batched(k)
        units = self.rewriter.reshaped(f"{scale.name}.units", scale, (self._num_experts, 1, 1))
        one = self.rewriter.constant("experts.one", np.ones((), np.float32), "f32")
        wide = self.cast(f"{name}_f32", x, "f32")
        quotient = self.make("Div", f"{name}_units", [wide, units], "f32", shape)
        codes = self.make(
            "QuantizeLinear",
            f"{name}_q",
            [quotient, one],
            code,
            shape,
            output_dtype=onnx_type(code),
        )
        return self.make(
            "DequantizeLinear",
            f"{name}_dq",
            [codes, one],
            self._dtype,
            shape,
            output_dtype=onnx_type(self._dtype),
        )

    def _dequantized(
        self, which: str, weight: Tensor, scale: Tensor | None, input_scale: Tensor | None
    ) -> Tensor:
        """[E, N, K] in the activation type; what the inputs were divided by is multiplied in."""
        if scale is None:
            return weight
        name, shape = f"experts.{which}.weight_dq", [int(extent) for extent in weight.shape]
        output_dtype = onnx_type(self._dtype)
        if group := int(self._node.attrs["group_size"]):
            assert input_scale is None, "4-bit experts have no quantised activations"
            return self.make(
                "DequantizeLinear",
                name,
                [weight, scale],
                self._dtype,
                shape,
                axis=2,
                block_size=group,
                output_dtype=output_dtype,
            )
        experts, n, k = shape
        rows = self.rewriter.reshaped(f"{weight.name}.rows", weight, (experts * n, k))
        scales = self.rewriter.derived(
            f"{scale.name}.rows",
            _RowScales(experts, n),
            [scale] if input_scale is None else [scale, input_scale],
            "f32",
            (experts * n,),
        )
        flat = self.make(
            "DequantizeLinear",
            name,
            [rows, scales],
            self._dtype,
            [experts * n, k],
            axis=0,
            output_dtype=output_dtype,
        )
        sizes = self.rewriter.constant(f"{weight.name}.shape", np.asarray(shape, np.int64), "i64")
        return self.make(
            "Reshape", f"experts.{which}.weight_stack", [flat, sizes], self._dtype, shape
        )

    def _gated(self, both: Tensor) -> Tensor:
        """act(gate) * up of [E, T, 2I]."""
        width = int(self._node.attrs["I"])
        shape, name = self._batched(width), f"{self.site}.experts.split"
        sizes = self.rewriter.constant(f"{name}.sizes", np.array([width, width], np.int64), "i64")
        gate, up = (
            self.rewriter.variable(f"{self.site}.experts.{half}.out", self._dtype, shape)
            for half in ("gate", "up")
        )
        self.rewriter.node("Split", name, [both, sizes], [gate, up], {"axis": 2})
        if self._node.attrs["activation"] == "silu":
            sigmoid = self.make("Sigmoid", "experts.sigmoid", [gate], self._dtype, shape)
            active = self.make("Mul", "experts.silu", [gate, sigmoid], self._dtype, shape)
        else:
            active = self.make(
                "Gelu", "experts.gelu", [gate], self._dtype, shape, approximate="tanh"
            )
        return self.make("Mul", "experts.product", [active, up], self._dtype, shape)

    def _sum(self, outputs: Tensor) -> None:
        """Over the experts in f32, rounded once, in the place of the node."""
        shape = self._batched(self._hidden)
        total = self.rewriter.variable(f"{self.site}.experts.sum.out", "f32", shape[1:])
        self.rewriter.node(
            "ReduceSum",
            f"{self.site}.experts.sum",
            [outputs, self.axes(0)],
            [total],
            {"keepdims": 0},
        )
        self.rewriter.node(
            "Cast", self._node.name, [total], self._node.outputs[:1], {"to": onnx_type(self._dtype)}
        )

    def _batched(self, width: int) -> list[int | str]:
        return [self._num_experts, self._num_rows, width]


@dataclass(frozen=True)
class _RowScales:
    """Scales [E, N, 1] of weights, times those [E] of their inputs -> [E * N]."""

    experts: int
    rows: int

    def __call__(self, scale: Array, *input_scale: Array) -> Array:
        scales = scale.astype(np.float32).reshape(self.experts, self.rows)
        if input_scale:
            scales = scales * input_scale[0].astype(np.float32).reshape(self.experts, 1)
        return scales.reshape(-1)


LOWER_EXPERTS = Rewrite("lower_experts", lower_experts)
