"""gated_linear on a GPU.

few rows    linear's kernel with the activation at its end, where there is one; where rows have
            scales of their own, what `quantize` is lowered to after it
many        gated_sm90.cu, where there is one for the SM, the sizes and the type; where rows have
            scales of their own, with results in bf16 and `quantize` after it
else        what `linear` and `swiglu` are lowered to, one after the other
"""

from dataclasses import replace

import msgspec

from trtc.plugins.gemm.cuda import lower_gemm
from trtc.plugins.gemm.skinny import gated_skinny_launches
from trtc.plugins.gemm.streamed_gated import gated_launches
from trtc.plugins.gpu.arch import SM_90
from trtc.plugins.gpu.composition import for_rows, renamed
from trtc.plugins.gpu.lowering import DIMS, ONE, SCRATCH, Extent, Launch, Lower, Site, Variant
from trtc.plugins.gpu.sources import CudaSource, KernelParameter
from trtc.plugins.gpu.triton_launch import count_index
from trtc.protos.dtypes import DTYPES

FEW_ROWS = 512
"""Up to so many, beyond those that one launch of linear's is for, cuBLASLt and the activation after
it are as fast (H200, Llama-3.1-8B's shape, hot, microseconds):

| rows | 512 | 768 | 1024 | 2048 | 4096 | 8192 |
|---|---|---|---|---|---|---|
| two steps | 110 | 166 | 209 | 405 | 797 | 1,612 |
| gated_sm90.cu | 112 | 163 | 198 | 382 | 752 | 1,490 |
"""
_TILE = 128
"""Columns of out, and bytes of K, that the kernel takes at once."""
_STAGES = 4
_GROUP = 16
"""Tiles of the same columns in a row (rasterisation): 8 were 1% slower, 4 4%, 32 up to 6%."""
_CLUSTER = 2
_PROGRAMS = SM_90.multiprocessors
_THREADS = 384
_MAP_BYTES = 128
_PRODUCT, _GATED = "product", "gated"
_PRODUCT_INPUTS = ("x", "weight", "weight_scale", "input_scale", "row_scale")
_MAPS = "maps"
_OUT_SCALES = "out_row_scale"


def lowering(activation: Lower, rounding: Lower) -> Lower:
    """The `lower` of this operator.

    Args:
        activation: that of swiglu; operators do not import each other.
        rounding: that of quantize.
    """

    def lower(site: Site) -> tuple[Variant, ...]:
        most = site.limits.max_num_tokens
        last = min(most, FEW_ROWS) if available(site) else most
        variants = {one.max_rows: one for one in _two_steps(site, activation, last)}
        variants |= _at_once(site, rounding, last)
        few = tuple(variant for _, variant in sorted(variants.items()))
        return few if last == most else (*few, _fused(site, rounding))

    return lower


def _at_once(site: Site, rounding: Lower, most: int) -> dict[int, Variant]:
    """What multiplies and activates in one launch, by the rows it is for, up to `most`."""
    has_rows = site.has("row_scale")
    streamed = gated_launches(_bf16_site(site) if has_rows else site)
    launches = gated_skinny_launches(site) | streamed
    found: dict[int, Variant] = {}
    for rows, launch in sorted(launches.items(), reverse=True):
        end = min(rows, most)
        alone = Variant(work=(launch,), max_rows=end)
        found[end] = _then_rounded(alone, site, rounding) if has_rows else alone
    return found


def _then_rounded(gated: Variant, site: Site, rounding: Lower) -> Variant:
    """What `gated` gives in bf16, quantised by row."""
    width = site.axes["I"]
    quantize = replace(
        site,
        axes={**site.axes, "K": width},
        dtypes={"x": "bf16", "out": site.dtypes["out"], "row_scale": "f32"},
        strides={**site.strides, "x": width, "row_scale": site.strides[_OUT_SCALES]},
        attributes={
            "out_dtype": site.dtypes["out"],
            "scales": site.attributes["scales"],
            "hadamard": 0,
            "codes": "none",
        },
    )
    after = for_rows(rounding(quantize), gated.max_rows)
    return replace(
        gated,
        work=(
            *renamed(gated.work, {"out": SCRATCH + _GATED}),
            *renamed(after.work, {"x": SCRATCH + _GATED, "row_scale": _OUT_SCALES}),
        ),
        scratch={**gated.scratch, _GATED: DTYPES["bf16"].num_bytes(width) * gated.max_rows},
    )


def _bf16_site(site: Site) -> Site:
    types = {name: site.dtypes[name] for name in _PRODUCT_INPUTS if site.has(name)}
    return replace(
        site, dtypes=types | {"out": "bf16"}, strides={**site.strides, "out": site.axes["I"]}
    )


def available(site: Site) -> bool:
    """Whether gated_sm90.cu takes the site: E4M3, whole tiles, and rows that its copies can begin
    at."""
    whole = site.axes["I"] % _TILE == 0 and site.axes["K"] % _TILE == 0
    is_e4m3 = site.has("out_scale") or site.has("row_scale")
    return site.arch.has_wgmma and is_e4m3 and whole


def _fused(site: Site, rounding: Lower) -> Variant:
    has_rows = site.has("row_scale")
    fused = Variant(
        work=(fused_launch(_bf16_site(site) if has_rows else site),),
        max_rows=site.limits.max_num_tokens,
        scratch={_MAPS: _PROGRAMS * 2 * _MAP_BYTES},
    )
    return _then_rounded(fused, site, rounding) if has_rows else fused


def fused_launch(site: Site) -> Launch:
    """One kernel for any number of rows."""
    by_rows = site.has("row_scale")
    scales = ("row_scale",) if by_rows else ("input_scale", "out_scale")
    types = {
        **{name: site.dtypes[name] for name in ("x", "weight")},
        **dict.fromkeys(("weight_scale", *scales), "f32"),
        DIMS: "i32",
        "out": site.dtypes["out"],
        SCRATCH + _MAPS: "u8",
    }
    shared = _shared_bytes()
    source = CudaSource(
        file="gated_linear/gated_sm90.cu",
        entry="gated_linear",
        parameters=tuple(
            KernelParameter(name.removeprefix(SCRATCH), dtype) for name, dtype in types.items()
        ),
        constants={
            "K": site.axes["K"],
            "I": site.axes["I"],
            "X_STRIDE": site.strides["x"],
            "OUT_STRIDE": site.strides["out"],
            "GELU_TANH": int(site.attributes["activation"] == "gelu_tanh"),
            "COUNT": count_index(site.rows),
            "STAGES": _STAGES,
            "GROUP": _GROUP,
            "CLUSTER": _CLUSTER,
            "PROGRAMS": _PROGRAMS,
            "SHARED_BYTES": shared,
            "BY_ROWS": int(by_rows),
            "ROW_SCALE_STRIDE": site.strides.get("row_scale", 0),
        },
        num_threads=_THREADS,
        shared_bytes=shared,
    )
    return Launch(
        kernel=source,
        arguments=tuple(types),
        grid=(Extent(times=_PROGRAMS), ONE, ONE),
        overlaps=True,
    )


def _shared_bytes() -> int:
    """Panels of x, gate and up by stage; factors, barriers and maps. A multiple of 1024."""
    return _STAGES * 3 * _TILE * _TILE + 5 * 1024


def _two_steps(site: Site, activation: Lower, max_rows: int) -> tuple[Variant, ...]:
    """Both products into a scratch buffer, gate's columns before up's, and from there."""
    width = site.axes["I"]
    limits = msgspec.structs.replace(site.limits, max_num_tokens=max_rows)
    products = lower_gemm(_product_site(replace(site, limits=limits)))
    gates = activation(_activation_site(replace(site, limits=limits)))
    view = DTYPES["bf16"].num_bytes(width)
    names = {"out": SCRATCH + _PRODUCT}
    parts = {"gate": SCRATCH + _PRODUCT, "up": SCRATCH + "up", "row_scale": _OUT_SCALES}
    return tuple(
        Variant(
            work=(
                *renamed(variant.work, names),
                *renamed(for_rows(gates, variant.max_rows).work, parts),
            ),
            max_rows=variant.max_rows,
            scratch={_PRODUCT: 2 * view * variant.max_rows},
            views={"up": (_PRODUCT, view)},
        )
        for variant in products
    )


def _product_site(site: Site) -> Site:
    width = 2 * site.axes["I"]
    return replace(
        site,
        dtypes={name: site.dtypes[name] for name in _PRODUCT_INPUTS if site.has(name)}
        | {"out": "bf16"},
        strides={**site.strides, "out": width},
        attributes={
            "N": width,
            "group_size": 0,
            "weight_dtype": site.attributes["weight_dtype"],
            "layout": "row_major",
            "activation": "exact",
            "softcap": 0.0,
            "out_dtype": "bf16",
        },
    )


def _activation_site(site: Site) -> Site:
    width = 2 * site.axes["I"]
    types = {name: site.dtypes[name] for name in ("out_scale", "out") if site.has(name)}
    strides = {**site.strides, "gate": width, "up": width}
    if site.has(_OUT_SCALES):
        types["row_scale"] = "f32"
        strides["row_scale"] = site.strides[_OUT_SCALES]
    return replace(
        site,
        dtypes={"gate": "bf16", "up": "bf16", **types},
        strides=strides,
        attributes={
            "activation": site.attributes["activation"],
            "scales": site.attributes["scales"],
            "hadamard": 0,
            "out_dtype": site.dtypes["out"],
        },
    )
