"""Activations of MLPs, gated or not, as trtc.swiglu."""

from trtc.builder.passes.base import Rewrite
from trtc.builder.passes.matching import Node, Tensor, dtype_of, is_fused, producer, site_of
from trtc.builder.passes.rewriter import Rewriter


def lower_swiglu(rewriter: Rewriter) -> bool:
    """Lower the middle of an MLP.

    Rules, with a(x) one of
        Mul(x, Sigmoid(x))          silu
        Gelu(x; approximate=tanh)   gelu_tanh
        Mul(Relu(x), Relu(x))       relu2
    and the operands of Mul in any order, for tensors [M, I]:
        Mul(a(gate), up)                                 -> swiglu(gate, up; a)
        Mul(Sigmoid(gate), up)                           -> swiglu(gate, up; sigmoid)
        a(x) that a linear or its quantize reads alone   -> swiglu(x; a)
    """
    gated = _lower_gated(rewriter)
    return _lower_plain(rewriter) or gated


def _lower_gated(rewriter: Rewriter) -> bool:
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


def _lower_plain(rewriter: Rewriter) -> bool:
    changed = False
    for node in (*rewriter.nodes("Mul"), *rewriter.nodes("Gelu")):
        output = node.outputs[0]
        found = _activation(output)
        reader = rewriter.sole_consumer(output)
        if found is None or not (is_fused(reader, "linear") or is_fused(reader, "quantize")):
            continue
        source, activation = found
        rewriter.fused(
            "swiglu",
            f"{site_of(node)}.swiglu",
            inputs={"gate": source},
            outputs={"out": output},
            attributes={"activation": activation, "out_dtype": dtype_of(source)},
        )
        changed = True
    return changed


def _match(rewriter: Rewriter, multiply: Node) -> tuple[Tensor, Tensor, str] | None:
    """(gate, up, activation) of activation(gate) * up."""
    left, right = multiply.inputs
    for activated, up in ((left, right), (right, left)):
        if rewriter.sole_consumer(activated) is None or list(activated.shape) != list(up.shape):
            continue
        found = _activation(activated) or _opened(activated, up)
        if found is not None:
            return found[0], up, found[1]
    return None


def _opened(activated: Tensor, up: Tensor) -> tuple[Tensor, str] | None:
    """(x, name) of a gate that attention's result is multiplied by; no part of a SiLU."""
    sigmoid = producer(activated, "Sigmoid")
    if sigmoid is None or sigmoid.inputs[0] is up:
        return None
    return sigmoid.inputs[0], "sigmoid"


def _activation(activated: Tensor) -> tuple[Tensor, str] | None:
    """(x, name) of an activation's result."""
    for name, source_of in _SOURCES.items():
        source = source_of(activated)
        if source is not None:
            return source, name
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


def _relu2_input(activated: Tensor) -> Tensor | None:
    multiply = producer(activated, "Mul")
    relu = producer(multiply.inputs[0], "Relu") if multiply is not None else None
    if multiply is None or relu is None or multiply.inputs[1] is not multiply.inputs[0]:
        return None
    return relu.inputs[0]


_SOURCES = {"gelu_tanh": _gelu_input, "silu": _silu_input, "relu2": _relu2_input}

LOWER_SWIGLU = Rewrite("lower_swiglu", lower_swiglu, requires=frozenset({"lower_linears"}))
