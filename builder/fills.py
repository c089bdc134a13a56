"""Distributions of `--dummy-weights`, chosen so that activations stay near one."""

import math
from collections.abc import Mapping

from trtc.plugins.op import Extent
from trtc.protos.dtypes import DTypeName
from trtc.protos.plan import Fill
from trtc.quant.formats.mxfp4 import GROUP

_DEPTH = {
    "weight": "K",
    "weight_scale": "K",
    "scale_unit": "K",
    "gate_up": "H",
    "gate_up_scale": "H",
    "gate_up_scale_unit": "H",
    "down": "I",
    "down_scale": "I",
    "down_scale_unit": "I",
}
"""Parameter -> the axis it is summed over."""
_CONSTANTS = {
    "input_scale": 1 / 32,
    "out_scale": 1 / 32,
    "gate_up_input_scale": 1 / 32,
    "down_input_scale": 1 / 32,
    "rate": -1.0,
}
"""Scales of activations: near one when unscaled, so +-4 as int8 and +-14 as E4M3. The rate of a
recurrent state, which would grow without bound if it were positive."""
_INDICES = {"columns": "N", "expert_map": "L", "gate_up_order": "H"}
"""Parameter -> the axis that it is an index of. Every rank has the first experts."""
_REPEATED = ("gate_up_order",)
"""Indices of which each row has all."""
_RANDOM_BITS_STD = {
    "i8": 73.9,
    "i6": 18.5,
    "i4": 4.6,
    "u4": 6.5,
    "iq4": 37.0,
    "f8e4m3": 0.6,
    "f4e2m1": 2.9,
    "bf16": 0.72,
}
"""Standard deviation of random codes (u4: with a random zero point; bf16: in layout compact)."""
_CODES: Mapping[str, DTypeName] = {"i8": "i8", "i6": "i8", "iq4": "u4"}
"""Elements of random codes that are not those of their type, or of tables."""
_SCALES = ("weight_scale", "gate_up_scale", "down_scale")
_E4M3_ONE = 56.0
"""The bits of 1 in E4M3: scales of E2M1 weights that are not in MXFP4's groups."""
_BOUNDED = ("cos", "sin", "table")
_BIASES = ("bias", "gate_up_bias", "down_bias")


def dummy_fill(
    parameter: str,
    dtype: DTypeName,
    attributes: Mapping[str, int | float | str],
    axes: Mapping[str, Extent],
) -> Fill:
    """The distribution of one weight, by its parameter of the operator."""
    weight_dtype = attributes.get("weight_dtype", dtype)
    depth = axes.get(_DEPTH.get(parameter, ""), 1)
    gain = math.sqrt(depth) if isinstance(depth, int) else 1.0
    if parameter in ("weight", "gate_up", "down"):
        if attributes.get("layout") == "compact":
            return Fill(element="compact")
        # Uniform in +-a has the standard deviation a / sqrt(3).
        element: DTypeName = _CODES.get(str(weight_dtype), weight_dtype)  # type: ignore[arg-type]
        return Fill(element=element, spread=math.sqrt(3) / gain)
    if parameter.endswith("_scale") and dtype == "u8":
        return _byte_scale(attributes, gain)
    if parameter.endswith("scale_unit"):
        return Fill(element="f32", center=_byte_unit(attributes, gain))
    if parameter in _SCALES:
        return Fill(element="f32", center=1 / (_RANDOM_BITS_STD[str(weight_dtype)] * gain))
    if parameter == "table" and weight_dtype in _CODES:
        return Fill(element=_CODES[str(weight_dtype)])
    if parameter == "table_scale":
        return Fill(element="f32", center=1 / _RANDOM_BITS_STD["i8"])
    if parameter in _INDICES:
        center = float(axes[_INDICES[parameter]])
        return Fill(element="i32", center=center, spread=float(parameter in _REPEATED))
    if parameter in _BOUNDED:
        return Fill(element=dtype, spread=1.0)
    if parameter in _BIASES:
        # As large in all rows, they would make all rows alike, and routers choose the same experts.
        return Fill(element=dtype, spread=0.01)
    return Fill(element=dtype, center=_CONSTANTS.get(parameter, 1.0))


def _byte_scale(attributes: Mapping[str, int | float | str], gain: float) -> Fill:
    """Of scales that are bytes: those of iq4 are random."""
    if attributes["weight_dtype"] != "f4e2m1":
        return Fill(element="u8")
    if attributes["group_size"] != GROUP:
        return Fill(element="e8m0", center=_E4M3_ONE)
    # E8M0: the power of two that is nearest to one over the size of a sum.
    return Fill(element="e8m0", center=127.0 - round(math.log2(_RANDOM_BITS_STD["f4e2m1"] * gain)))


def _byte_unit(attributes: Mapping[str, int | float | str], gain: float) -> float:
    if attributes["weight_dtype"] == "f4e2m1":
        return 1 / (_RANDOM_BITS_STD["f4e2m1"] * gain)
    # Of scales whose bytes are 0 to 15, which are about 2^-6.4.
    return 2**6.4 / (_RANDOM_BITS_STD["iq4"] * gain)
