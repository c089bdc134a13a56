"""Gated activations as trtc.swiglu."""

from trtc.builder.passes.base import Rewrite
from trtc.builder.passes.matching import Node, Tensor, dtype_of, producer, site_of
from trtc.builder.passes.rewriter import Rewriter


def lower_swiglu(rewriter: Rewriter) -> bool:
    """Lower the middle of a gated MLP.

    Rules:
        Mul(Mul(gate, Sigmoid(gate)), up)          -> swiglu(gate, up; silu)
        Mul(Gelu(gate; approximate=tanh), up)      -> swiglu(gate, up; gelu_tanh)
    with the operands of Mul in any order, for tensors [M, I].
    """
    changed = False
    for multiply in rewriter.nodes("Mul"):
        found = _match(rewriter, multiply)
        if found is None:
            continue
        gate, up, activation = found
        output = multiply.outputs[0]
        rewriter.fused(
            "swiglu",
            f"{site_of(multiply)}.swiglu",
            inputs={"gate": gate, "up": up},
            outputs={"out": output},
            attributes={"activation": activation, "out_dtype": dtype_of(gate)},
        )
        changed = True
    return changed


def _match(rewriter: Rewriter, multiply: Node) -> tuple[Tensor, Tensor, str] | None:
    """(gate, up, activation) of activation(gate) * up."""
    left, right = multiply.inputs
    for activated, up in ((left, right), (right, left)):
        if rewriter.sole_consumer(activated) is None or list(activated.shape) != list(up.shape):
            continue
        gate = _gelu_input(activated)
        if gate is not None:
            return gate, up, "gelu_tanh"
        gate = _silu_input(activated)
        if gate is not None:
            return gate, up, "silu"
    return None


def _gelu_input(activated: Tensor) -> Tensor | None:
    gelu = producer(activated, "Gelu")
    is_tanh = gelu is not None and gelu.attrs.get("approximate", "none") == "tanh"
    return gelu.inputs[0] if gelu is not None and is_tanh else None


def _silu_input(activated: Tensor) -> Tensor | None:
    multiply = producer(activated, "Mul")
    if multiply is None:
        return None
    left, right = multiply.inputs
    for gate, gated in ((left, right), (right, left)):
        sigmoid = producer(gated, "Sigmoid")
        if sigmoid is not None and sigmoid.inputs[0] is gate:
            return gate
    return None


LOWER_SWIGLU = Rewrite("lower_swiglu", lower_swiglu)
