"""What a fused operator is: one definition that the graph, every target and the tests read."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["activation", "weight", "step", "pool"]


@dataclass(frozen=True)
class Parameter:
    """One tensor input or output.

    `axes` are symbols bound by the first input that has them (or by an attribute of the same
    name); an axis may be a product such as "num_heads*head_dim". The row axes of activations
    ("M") may vary from step to step, all others are static.
    """

    name: str
    axes: tuple[str, ...]
    dtypes: tuple[str, ...]
    """Allowed names of protos/dtypes.py."""
    role: Role = "activation"
    optional: bool = False


@dataclass(frozen=True)
class Attribute:
    """A compile-time constant of a call.

    An enum's values are spelled in C++ as `trtc::<cpp_enum>::<value>`.
    """

    name: str
    kind: Literal["int", "float", "enum"]
    default: int | float | str | None = None
    """None: must be given."""
    choices: tuple[str, ...] = ()
    cpp_enum: str = ""


@dataclass(frozen=True)
class Tolerance:
    """A kernel's output may differ from the reference by `absolute + relative * |reference|`."""

    absolute: float
    relative: float


@dataclass(frozen=True)
class FusedOp:
    """An operator of the domain `trtc`.

    The ONNX node has the declared inputs in order ("" where an optional one is absent) and the
    declared outputs; the C++ kernel is `template <class C> void <name>(Context&, const
    <name>_args&)` in the operator's cpu.hpp, where C carries the static axes, attributes and the
    element type of every parameter as members (`C::K`, `C::eps`, `C::x_t`), and the args struct
    has a `View` per parameter and an `int` per varying axis, in declared order.
    """

    name: str
    summary: str
    inputs: tuple[Parameter, ...]
    outputs: tuple[Parameter, ...]
    reference: Callable[..., tuple[Any, ...]]
    """Slow, obvious, fp32: called with every input (None if absent) and attribute by name."""
    attributes: tuple[Attribute, ...] = ()
    tolerances: Mapping[str, Tolerance] = field(default_factory=dict)
    """By the element type of the first output."""
    in_place: Mapping[str, str] = field(default_factory=dict)
    """Output name -> the input whose memory it is."""

    def attribute(self, name: str) -> Attribute:
        return next(attribute for attribute in self.attributes if attribute.name == name)

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return self.inputs + self.outputs
