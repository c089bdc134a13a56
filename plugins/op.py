"""The definition of a fused operator, which the graph, every target and the tests read."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["activation", "weight", "step", "pool"]
Extent = int | str
"""Length of an axis: a number, or the name of one that varies from step to step."""


@dataclass(frozen=True)
class Parameter:
    """One tensor input or output.

    `axes` are symbols bound by the first input that has them (or by an attribute of the same
    name); an axis may be a product and a sum, such as "num_heads*head_dim" or "B+1". The
    operator's `row_axes` may vary from step to step, all others are static.
    """

    name: str
    axes: tuple[str, ...]
    dtypes: tuple[str, ...]
    """Allowed names of protos/dtypes.py."""
    role: Role = "activation"
    optional: bool = False
    dtype_from: str = ""
    """For an output with several `dtypes`: the input or enum attribute that decides its type."""


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
    """Tolerance of a kernel against the reference: `absolute + relative * |reference|`."""

    absolute: float
    relative: float


@dataclass(frozen=True)
class TensorType:
    """Element type (a name of protos/dtypes.py) and shape of a tensor."""

    dtype: str
    shape: tuple[Extent, ...]


@dataclass(frozen=True)
class FusedOp:
    """An operator of the domain `trtc`.

    The ONNX node has the declared inputs in order ("" where an optional one is absent) and the
    declared outputs; the C++ kernel is `template <class C> void <name>(Context&, const
    <name>_args&)` in the operator's cpu.hpp, where C carries the static axes, attributes and the
    element type of every parameter as members (`C::K`, `C::eps`, `C::x_t`), and the args struct
    has a `View` per parameter in declared order, then an `std::int64_t` per row axis.
    """

    name: str
    summary: str
    inputs: tuple[Parameter, ...]
    outputs: tuple[Parameter, ...]
    reference: Callable[..., tuple[Any, ...]]
    """The slow fp32 definition, called with every input (None if absent) and attribute by name."""
    attributes: tuple[Attribute, ...] = ()
    tolerances: Mapping[str, Tolerance] = field(default_factory=dict)
    """By the element type of the first output."""
    in_place: Mapping[str, str] = field(default_factory=dict)
    """Output name -> the input whose memory it is."""
    overwrites: Mapping[str, str] = field(default_factory=dict)
    """Output name -> an input of the same shape whose memory it may reuse where that is not read
    later: every kernel reads an element of it right before it writes the same element."""
    row_axes: tuple[str, ...] = ("M",)
    """Axis symbols that may vary from step to step, in the order of the kernel's arguments."""
    collective: bool = False
    """A collective over the ranks of a sharded model: for each input the reference takes every
    rank's, in their order."""

    def attribute(self, name: str) -> Attribute:
        return next(attribute for attribute in self.attributes if attribute.name == name)

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return self.inputs + self.outputs

    def complete_attributes(
        self, given: Mapping[str, int | float | str]
    ) -> dict[str, int | float | str]:
        """`given` checked against the declaration, with defaults filled in, in declared order.

        Raises:
            ValueError: an unknown or missing attribute, or a value of the wrong kind.
        """
        unknown = sorted(set(given) - {attribute.name for attribute in self.attributes})
        if unknown:
            raise ValueError(f"{self.name} has no attribute {', '.join(unknown)}")
        return {
            attribute.name: _checked(self.name, attribute, given.get(attribute.name))
            for attribute in self.attributes
        }

    def bind_axes(
        self,
        inputs: Mapping[str, TensorType | None],
        attributes: Mapping[str, int | float | str],
    ) -> dict[str, Extent]:
        """The extent of every axis symbol that the inputs and integer attributes determine.

        Raises:
            ValueError: an input is missing, unknown, of a type that is not allowed, or of a shape
                that contradicts another's.
        """
        attributes = self.complete_attributes(attributes)
        self._check_inputs(inputs)
        extents: dict[str, Extent] = {
            attribute.name: int(attributes[attribute.name])
            for attribute in self.attributes
            if attribute.kind == "int"
        }
        dimensions = [
            (parameter, axis, extent)
            for parameter in self.inputs
            if (tensor := inputs.get(parameter.name)) is not None
            and not _is_packed(parameter, tensor)
            for axis, extent in zip(parameter.axes, tensor.shape, strict=True)
        ]
        # Bare symbols first: "B+1" with a symbolic extent says nothing about B by itself.
        dimensions.sort(key=lambda dimension: not dimension[1].isidentifier())
        for parameter, axis, extent in dimensions:
            _bind(f"{self.name}.{parameter.name}", axis, extent, extents)
        return extents

    def infer_outputs(
        self,
        inputs: Mapping[str, TensorType | None],
        attributes: Mapping[str, int | float | str],
    ) -> dict[str, TensorType]:
        """Element type and shape of every declared output, optional ones too.

        Raises:
            ValueError: as `bind_axes`.
        """
        attributes = self.complete_attributes(attributes)
        extents = self.bind_axes(inputs, attributes)
        return {
            parameter.name: TensorType(
                self._output_dtype(parameter, inputs, attributes),
                tuple(axis_extent(axis, extents) for axis in parameter.axes),
            )
            for parameter in self.outputs
        }

    def _check_inputs(self, inputs: Mapping[str, TensorType | None]) -> None:
        unknown = sorted(set(inputs) - {parameter.name for parameter in self.inputs})
        if unknown:
            raise ValueError(f"{self.name} has no input {', '.join(unknown)}")
        for parameter in self.inputs:
            tensor = inputs.get(parameter.name)
            where = f"{self.name}.{parameter.name}"
            if tensor is None:
                if not parameter.optional:
                    raise ValueError(f"{where} is missing")
                continue
            if tensor.dtype not in parameter.dtypes:
                raise ValueError(f"{where} is {tensor.dtype}, not {' or '.join(parameter.dtypes)}")
            if len(tensor.shape) != len(parameter.axes) and not _is_packed(parameter, tensor):
                raise ValueError(f"{where} has shape {tensor.shape}, not {parameter.axes}")

    def _output_dtype(
        self,
        parameter: Parameter,
        inputs: Mapping[str, TensorType | None],
        attributes: Mapping[str, int | float | str],
    ) -> str:
        source = self.in_place.get(parameter.name) or parameter.dtype_from
        if source in attributes:
            dtype = str(attributes[source])
        elif (tensor := inputs.get(source)) is not None:
            dtype = tensor.dtype
        else:
            assert len(parameter.dtypes) == 1, f"{self.name}.{parameter.name} lacks dtype_from"
            dtype = parameter.dtypes[0]
        if dtype not in parameter.dtypes:
            raise ValueError(f"{self.name}.{parameter.name} can't be {dtype}")
        return dtype


def _is_packed(parameter: Parameter, tensor: TensorType) -> bool:
    """Whether a weight is given as its layout's bytes, whose length binds no axis."""
    elements = set(parameter.dtypes) - {"u8"}
    return bool(elements) and tensor.dtype == "u8" and len(tensor.shape) == 1


def axis_extent(axis: str, extents: Mapping[str, Extent]) -> Extent:
    """The extent of an axis expression: a sum of products of symbols and numbers.

    A symbol without a known number stays in the answer by name: "T", "B+1".

    Raises:
        KeyError: a symbol is not bound at all.
    """
    constant, symbolic = 0, []
    for term in axis.split("+"):
        number, names = _product(term, extents)
        if names:
            symbolic.append("*".join([str(number), *names] if number != 1 else names))
        else:
            constant += number
    if not symbolic:
        return constant
    return "+".join([*symbolic, str(constant)] if constant else symbolic)


def _product(term: str, extents: Mapping[str, Extent]) -> tuple[int, list[str]]:
    number, names = 1, []
    for factor in term.split("*"):
        extent = int(factor) if factor.isdigit() else extents[factor]
        if isinstance(extent, int):
            number *= extent
        else:
            names.append(extent)
    return number, names


def _symbols(axis: str) -> list[str]:
    return [
        factor for term in axis.split("+") for factor in term.split("*") if not factor.isdigit()
    ]


def _bind(where: str, axis: str, extent: Extent, extents: dict[str, Extent]) -> None:
    """Bind the one unknown symbol of `axis`, or check that the known ones give `extent`."""
    unknown = [symbol for symbol in _symbols(axis) if symbol not in extents]
    if len(unknown) > 1:
        raise ValueError(
            f"{where}: {' and '.join(unknown)} can't be distinguished from axis {axis!r}"
        )
    if unknown:
        extents[unknown[0]] = _solved(where, axis, extent, unknown[0], extents)
        return
    known = axis_extent(axis, extents)
    if isinstance(known, int) and isinstance(extent, int):
        if known != extent:
            raise ValueError(f"{where} has {extent} along {axis!r} where {known} is expected")
    elif axis.isidentifier() and isinstance(extent, int):
        extents[axis] = extent  # A number is better than a name.


def _solved(
    where: str, axis: str, extent: Extent, symbol: str, extents: Mapping[str, Extent]
) -> Extent:
    if axis == symbol:
        return extent
    if not isinstance(extent, int):
        return symbol
    offset = axis_extent(axis, {**extents, symbol: 0})
    slope = axis_extent(axis, {**extents, symbol: 1})
    if not isinstance(offset, int) or not isinstance(slope, int):
        return symbol
    value, rest = divmod(extent - offset, slope - offset)
    if rest or value < 0:
        raise ValueError(f"{where} has {extent} along {axis!r}, which no {symbol} gives")
    return value


def _checked(op: str, attribute: Attribute, value: int | float | str | None) -> int | float | str:
    where = f"{op}.{attribute.name}"
    value = attribute.default if value is None else value
    if value is None:
        raise ValueError(f"{where} must be given")
    if attribute.kind == "enum":
        if value not in attribute.choices:
            raise ValueError(f"{where} is {value!r}, not one of {', '.join(attribute.choices)}")
        return value
    if isinstance(value, str) or (attribute.kind == "int" and value != int(value)):
        raise ValueError(f"{where} is {value!r}, not {attribute.kind}")
    return int(value) if attribute.kind == "int" else float(value)
