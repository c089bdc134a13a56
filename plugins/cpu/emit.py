"""The C++ spelling of a call: the configuration struct that specialises a kernel."""

from collections.abc import Mapping

import numpy as np

from trtc.plugins.op import Attribute, FusedOp
from trtc.protos.dtypes import DTYPES


def config_struct(
    name: str,
    op: FusedOp,
    *,
    axes: Mapping[str, int | str],
    attributes: Mapping[str, int | float | str],
    dtypes: Mapping[str, str],
    page_size: int | None = None,
) -> str:
    """`struct <name>` with every static axis, attribute and element type of one kind of call.

    Args:
        axes: extents as `FusedOp.bind_axes` gives them; those that are not numbers and the
            operator's row axes vary by step and are left out.
        dtypes: parameter -> name of protos/dtypes.py; an absent parameter becomes `trtc::none`.
        page_size: of the pool, for operators with one, when `axes` does not say it.
    """
    values = op.complete_attributes(attributes)
    static = {
        axis: extent
        for axis, extent in axes.items()
        if isinstance(extent, int) and axis not in op.row_axes and axis not in values
    }
    has_pool = any(parameter.role == "pool" for parameter in op.parameters)
    if page_size is not None and has_pool and "page_size" not in values:
        static.setdefault("page_size", page_size)
    lines = [f"  static constexpr std::int64_t {axis} = {static[axis]};" for axis in sorted(static)]
    lines += [_constant(attribute, values[attribute.name]) for attribute in op.attributes]
    lines += [
        f"  using {parameter.name}_t = {_cpp_type(dtypes.get(parameter.name))};"
        for parameter in op.parameters
    ]
    return "\n".join([f"struct {name} {{", *lines, "};"])


def _constant(attribute: Attribute, value: int | float | str) -> str:
    if attribute.kind == "enum":
        return f"  static constexpr auto {attribute.name} = trtc::{attribute.cpp_enum}::{value};"
    if attribute.kind == "int":
        return f"  static constexpr std::int64_t {attribute.name} = {value};"
    # The shortest decimal that reads back as the same float.
    literal = np.format_float_scientific(np.float32(value), unique=True, trim="0")
    return f"  static constexpr float {attribute.name} = {literal}f;"


def _cpp_type(dtype: str | None) -> str:
    return "trtc::none" if dtype is None else DTYPES[dtype].cpp
