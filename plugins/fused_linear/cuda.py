"""fused_linear on a GPU.

one row     gemm/mixed_input.cu, in one launch
more        what `rms_norm`, `linear` and `swiglu` are lowered to, one after the other
"""

from collections.abc import Mapping
from dataclasses import replace

from trtc.plugins.gemm.cuda import lower_gemm
from trtc.plugins.gemm.mixed_input import fused_variant
from trtc.plugins.gpu.composition import for_rows, renamed
from trtc.plugins.gpu.lowering import SCRATCH, Lower, Site, Variant
from trtc.protos.dtypes import DTYPES

_NORMED, _PRODUCT, _UP = "normed", "product", "up"
"""Scratch: x as the norm gives it; gate's columns before up's, and where these begin."""
_TYPE = "bf16"
_WEIGHT = ("weight", "weight_scale", "weight_zero", "scale_unit", "bias")


def lowering(norm: Lower, gate: Lower) -> Lower:
    """The `lower` of this operator.

    Args:
        norm: that of rms_norm; operators do not import each other.
        gate: that of swiglu.
    """

    def lower(site: Site) -> tuple[Variant, ...]:
        fused = fused_variant(fused_site(site))
        norms = norm(_norm_site(site)) if site.has("norm_weight") else ()
        gates = gate(_gate_site(site)) if _is_gated(site) else ()
        steps = tuple(_steps(site, one, norms, gates) for one in lower_gemm(_product_site(site)))
        if fused is None:
            return steps
        return (fused, *(one for one in steps if one.max_rows > fused.max_rows))

    return lower


def _steps(
    site: Site, product: Variant, norms: tuple[Variant, ...], gates: tuple[Variant, ...]
) -> Variant:
    """A variant of the product, the norm before it and the gate after it, if there are."""
    rows = product.max_rows
    work, scratch, views = renamed(product.work, _product_places(site)), dict(product.scratch), {}
    if norms:
        names = {"weight": "norm_weight", "pre_scale": "norm_pre_scale", "out": SCRATCH + _NORMED}
        work = (*renamed(for_rows(norms, rows).work, names), *work)
        scratch[_NORMED] = DTYPES[_TYPE].num_bytes(site.axes["K"]) * rows
    if gates:
        half = DTYPES[_TYPE].num_bytes(site.axes["I"])
        names = {"gate": _PRODUCT, "up": _UP}
        places = {name: SCRATCH + buffer for name, buffer in names.items()}
        places["pre_scale"] = "gate_pre_scale"
        work = (*work, *renamed(for_rows(gates, rows).work, places))
        scratch[_PRODUCT] = 2 * half * rows
        views[_UP] = (_PRODUCT, half)
    return Variant(work=work, max_rows=rows, scratch=scratch, views=views)


def _is_gated(site: Site) -> bool:
    return bool(site.attributes["gated"])


def _product_places(site: Site) -> Mapping[str, str]:
    x = {"x": SCRATCH + _NORMED} if site.has("norm_weight") else {}
    return x | ({"out": SCRATCH + _PRODUCT} if _is_gated(site) else {})


def _linear_attributes(site: Site) -> dict[str, int | float | str]:
    return {
        "N": site.axes["N"],
        "group_size": site.attributes["group_size"],
        "weight_dtype": site.attributes["weight_dtype"],
        "layout": "tiles",
        "activation": "exact",
        "softcap": 0.0,
        "out_dtype": _TYPE,
    }


def fused_site(site: Site) -> Site:
    """A linear's, with the inputs and attributes that this operator has beside it."""
    gate = site.attributes["activation"] if _is_gated(site) else "none"
    beside = {"eps": site.attributes["eps"], "gate": gate}
    return replace(site, attributes=_linear_attributes(site) | beside)


def _product_site(site: Site) -> Site:
    given = {name: site.dtypes[name] for name in _WEIGHT if site.has(name)}
    strides = dict(site.strides)
    if site.has("norm_weight"):
        strides["x"] = site.axes["K"]
    if _is_gated(site):
        strides["out"] = site.axes["N"]
    return replace(
        site,
        dtypes={"x": _TYPE, **given, "out": _TYPE},
        strides=strides,
        attributes=_linear_attributes(site),
    )


def _norm_site(site: Site) -> Site:
    given = {"weight": "norm_weight", "pre_scale": "norm_pre_scale"}
    types = {name: site.dtypes[ours] for name, ours in given.items() if site.has(ours)}
    return replace(
        site,
        dtypes={"x": _TYPE, **types, "out": _TYPE},
        strides={"x": site.strides["x"], "out": site.axes["K"]},
        attributes={
            "eps": site.attributes["eps"],
            "centered": 0,
            "hadamard": 0,
            "out_dtype": _TYPE,
        },
    )


def _gate_site(site: Site) -> Site:
    width = site.axes["N"]
    pre_scale = {"pre_scale": "f32"} if site.has("gate_pre_scale") else {}
    return replace(
        site,
        dtypes={"gate": _TYPE, "up": _TYPE, **pre_scale, "out": _TYPE},
        strides={"gate": width, "up": width, "out": site.strides["out"]},
        attributes={"activation": site.attributes["activation"], "out_dtype": _TYPE},
    )
