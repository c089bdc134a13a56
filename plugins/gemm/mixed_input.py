"""linear with weights of integers, or of E4M3 in groups, on a GPU. Four kernels, by rows:

    few         mixed_input.cu: 4-bit weights in tiles, 6-bit or int8 ones in rows, at the bandwidth
                of memory
    on sm_90    mixed_input_sm90.cu: the same weights but those of 6 bits, by WGMMA
    more        multiply_mixed_input: tiles of weights become operands in registers
    many        widen_weight: the weight is dequantised to bf16 once, and cuBLASLt multiplies

All but the last give exact products; for one row, of numbers that differ from x by less than a
2^30th of the largest nearby. The last rounds a dequantised weight to bf16, which is where the
source graph's DequantizeLinear rounds it too. int8 x is always multiplied the third way, and E4M3
weights the last two.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import triton

from trtc.plugins.gemm.mixed_input_sm90 import cut_variants, cuts, few_rows
from trtc.plugins.gemm.mixed_input_tactics import (
    Few,
    Weight,
    few_tactics,
    more_tactics,
    shared_bytes,
    widen_from,
)
from trtc.plugins.gemm.tiling import integer_macros
from trtc.plugins.gemm.triton.mixed_input import multiply_mixed_input, widen_weight
from trtc.plugins.gemm.triton.weights import e2m1_constants, weight_constants
from trtc.plugins.gpu.lowering import (
    DIMS,
    NEXT_WEIGHT,
    ONE,
    SCRATCH,
    Extent,
    Gemm,
    Launch,
    Site,
    Variant,
)
from trtc.plugins.gpu.scratch_launch import scratch_launch
from trtc.plugins.gpu.sources import CudaSource, KernelParameter
from trtc.plugins.gpu.triton_launch import count_index
from trtc.plugins.tiles import CHANNELS, ROWS
from trtc.protos.errors import UnsupportedError

_WIDE = "wide_weight"
"""Scratch buffer: bf16 [N, K]."""
_WIDEN_ROWS = 64
_SMALL_GROUP = 16
"""Channels of E2M1 that share a scale, for which a product of their own is too small: their scales
multiply the weights, which is exact in bf16."""
_FEW_PARAMETERS = (
    "x",
    "norm_weight",
    "norm_pre_scale",
    "weight",
    "weight_scale",
    "weight_zero",
    "scale_unit",
    "bias",
    "residual",
    "gate_pre_scale",
)
"""Of mixed_input.cu, before dims and out; norm and gate are fused_linear's."""
_TYPES_BESIDE = {DIMS: "i32", NEXT_WEIGHT: "u8"}
_GATES = {"none": 0, "silu": 1, "gelu_tanh": 2}
_MAX_NORM_EIGHTS = 2
"""Runs of eight channels whose squares a thread has registers for."""
_MAX_SUMS = 8 * 512
"""Rows of x times threads of a block of mixed_input.cu that two blocks' registers have room for."""


def lower_mixed_input(site: Site) -> tuple[Variant, ...]:
    """The variants of a linear whose weight is of integers, or in groups.

    Raises:
        UnsupportedError: groups that are too small to be summed apart by the tensor cores.
    """
    most = site.limits.max_num_tokens
    ours = (*_few(site), *_on_sm90(site))
    first_wide = most + 1
    if _can_widen(site):
        last = max((variant.max_rows for variant in ours), default=0)
        first_wide = max(widen_from(site.axes["N"]), last + 1)
    variants: list[Variant] = []
    for variant in (*ours, *_more(site)):
        end = min(variant.max_rows, most, first_wide - 1)
        if not variants or end > variants[-1].max_rows:
            variants.append(replace(variant, max_rows=end))
    return (*variants, _widened(site)) if most >= first_wide else tuple(variants)


def _few(site: Site) -> Iterator[Variant]:
    """mixed_input.cu, by ascending rows."""
    if _is_ours(site):
        weight = _weight(site)
        last = few_rows(weight) if site.arch.has_wgmma else None
        tactics = few_tactics(site.sm, weight)
        yield from few_variants(site, (few for few in tactics if last is None or few.rows <= last))


def _on_sm90(site: Site) -> Iterator[Variant]:
    """mixed_input_sm90.cu, by ascending rows."""
    if site.arch.has_wgmma and _is_ours(site):
        weight = _weight(site)
        yield from cut_variants(site, weight, cuts(weight))


def _is_ours(site: Site) -> bool:
    """Whether the CUDA C++ kernels take the site."""
    return site.dtypes["x"] == "bf16" and (site.attributes["layout"] == "tiles" or _has_rows(site))


def _has_rows(site: Site) -> bool:
    """Whether they take a weight in rows: int8 or of 6 bits, in whole tiles of large groups."""
    is_ours = site.attributes["weight_dtype"] in ("i8", "i6") and not site.has("input_scale")
    whole_groups = _group(site) % CHANNELS == 0 and site.axes["K"] % _group(site) == 0
    return is_ours and whole_groups and site.axes["N"] % ROWS == 0


def _weight(site: Site) -> Weight:
    return Weight(
        columns=site.axes["N"],
        depth=site.axes["K"],
        group_size=_group(site),
        bits={"i8": 8, "i6": 6}.get(str(site.attributes["weight_dtype"]), 4),
        has_zero=site.has("weight_zero"),
        byte_scales=site.dtypes.get("weight_scale") == "u8",
        gated=_gate(site) != "none",
        normed=site.has("norm_weight"),
    )


def _gate(site: Site) -> str:
    return str(site.attributes.get("gate", "none"))


def fused_variant(site: Site) -> Variant | None:
    """One row of a linear in tiles in one launch of mixed_input.cu, with the norm of x before and
    the gate of its halves after it, if the site has them.

    Args:
        site: a linear's, with fused_linear's other inputs and attributes.

    Returns:
        None where x does not fit into shared memory, or its squares not into registers, or where
        gate and up share a tile.
    """
    if _gate(site) != "none" and site.axes["N"] // 2 % ROWS:
        return None
    tactics = (few for few in few_tactics(site.sm, _weight(site)) if few.rows == 1)
    if site.has("norm_weight"):
        most = 8 * _MAX_NORM_EIGHTS
        tactics = (few for few in tactics if site.axes["K"] <= most * few.num_threads)
    return next(few_variants(site, tactics), None)


def few_variants(site: Site, tactics: Iterable[Few]) -> Iterator[Variant]:
    """One launch of mixed_input.cu each, cut as the tactic says."""
    for few in tactics:
        present = tuple(name for name in _FEW_PARAMETERS if site.has(name))
        following = (NEXT_WEIGHT,) if _next_bytes(site, few) else ()
        arguments = (*present, *following, DIMS, "out")
        kernel = CudaSource(
            file="gemm/mixed_input.cu",
            entry="mixed_input_gemm",
            parameters=tuple(
                KernelParameter(name, _TYPES_BESIDE.get(name) or site.dtypes[name])
                for name in arguments
            ),
            constants=_few_constants(site, few),
            num_threads=few.num_threads,
            shared_bytes=shared_bytes(few, _weight(site)),
        )
        launch = Launch(
            kernel=kernel,
            arguments=arguments,
            grid=(Extent(times=few.blocks(site.axes["N"])), ONE, ONE),
            overlaps=site.arch.has_pdl,
        )
        yield Variant(work=(launch,), max_rows=few.rows)


def _next_bytes(site: Site, few: Few) -> int:
    """Of the next call's weight, if the tactic has some of it brought to L2."""
    return site.next_weight_bytes if few.next_share and site.arch.has_pdl else 0


def _few_constants(site: Site, few: Few) -> dict[str, int | float | str]:
    weight = _weight(site)
    # With half of a multiprocessor's registers for rings and sums of few rows.
    is_small = few.row_tiles == 1 and few.rows * few.num_threads <= _MAX_SUMS
    has_room = 2 * shared_bytes(few, weight) <= site.arch.shared_bytes
    fits_twice = is_small and 2 * few.num_threads <= 1024 and has_room
    return {
        **integer_macros(site, weight),
        "DIGITS": int(few.digits),
        "ROWS": few.rows,
        "ROW_TILES": few.row_tiles,
        "ROW_WARPS": few.row_warps,
        "SPLITS": few.splits,
        "CLUSTER": few.cluster,
        "STAGES": few.stages,
        "EARLY": few.early,
        "MIN_BLOCKS": 2 if fits_twice else 1,
        "HAS_NORM": int(weight.normed),
        "HAS_NORM_PRE_SCALE": int(site.has("norm_pre_scale")),
        "EPS": float(site.attributes.get("eps", 0.0)),
        "GATE": _GATES[_gate(site)],
        "HAS_GATE_PRE_SCALE": int(site.has("gate_pre_scale")),
        "NEXT_BYTES": _next_bytes(site, few),
        "NEXT_SHARE": few.next_share,
    }


def _more(site: Site) -> Iterator[Variant]:
    """multiply_mixed_input, by ascending rows."""
    columns, constants = site.axes["N"], _product_constants(site)
    for more in more_tactics(site.sm, columns, site.dtypes["x"]):
        launch = scratch_launch(
            site,
            multiply_mixed_input,
            {
                "COUNT": count_index(site.rows),
                "COLUMNS": columns,
                "DEPTH": site.axes["K"],
                "SCALES": row_scales(site),
                "SCALE_STRIDE": site.strides.get("row_scale", 0),
                "X_STRIDE": site.strides["x"],
                "OUT_STRIDE": site.strides["out"],
                "RESIDUAL_STRIDE": site.strides.get("residual", 0),
                "SOFTCAP": float(site.attributes["softcap"]),
                **constants,
                "BLOCK_M": more.block_m,
                "BLOCK_N": more.block_n,
                "STAGES": more.num_stages,
            },
            (
                Extent(site.rows, block=more.block_m),
                Extent(times=triton.cdiv(columns, more.block_n)),
                ONE,
            ),
            num_warps=more.num_warps,
            scratch={},
        )
        yield Variant(work=(launch,), max_rows=more.max_rows)


def row_scales(site: Site) -> int:
    """Of a row of x; 0: it has none of its own.

    Raises:
        UnsupportedError: several, which are not of the groups of the weight.
    """
    count = site.axes["scales"] if site.has("row_scale") else 0
    if count > 1 and count * int(site.attributes["group_size"]) != site.axes["K"]:
        raise UnsupportedError(
            "kernels take scales of an activation in the groups of the weight's", field="row_scale"
        )
    return count


def _can_widen(site: Site) -> bool:
    """cuBLASLt takes bf16 and gives bf16, with a bias, a residual and nothing else."""
    return (
        site.dtypes["x"] == "bf16"
        and site.dtypes["out"] == "bf16"
        and site.dtypes.get("residual", "bf16") == "bf16"
        and not site.has("input_scale")
        and site.attributes["softcap"] == 0
    )


def _widened(site: Site) -> Variant:
    columns, depth = site.axes["N"], site.axes["K"]
    constants = _weight_constants(site)
    if constants["GROUP"]:
        # A program widens channels of one group; a product takes two small ones at once.
        constants["BLOCK_K"] = min(constants["BLOCK_K"], constants["GROUP"])
    widen = scratch_launch(
        site,
        widen_weight,
        {"COLUMNS": columns, "DEPTH": depth, **constants, "BLOCK_N": _WIDEN_ROWS},
        (
            Extent(times=triton.cdiv(columns, _WIDEN_ROWS)),
            Extent(times=triton.cdiv(depth, constants["BLOCK_K"])),
            ONE,
        ),
        num_warps=4,
        scratch={_WIDE: "bf16"},
    )
    names = {name: name for name in ("bias", "residual") if site.has(name)}
    product = Gemm(weight=SCRATCH + _WIDE, **names)
    return Variant(
        work=(widen, product),
        max_rows=site.limits.max_num_tokens,
        scratch={_WIDE: 2 * columns * depth},
    )


def _weight_constants(site: Site) -> dict[str, int]:
    return weight_constants(site.attributes, _most_depth(site), has_unit=site.has("scale_unit"))


def _product_constants(site: Site) -> dict[str, int]:
    """The same of what multiplies tiles of weights, with whether scales multiply the weights."""
    small = int(site.attributes["group_size"]) == _SMALL_GROUP
    in_words = site.axes["K"] % (4 * _SMALL_GROUP) == 0
    if small and in_words and site.attributes["weight_dtype"] == "f4e2m1":
        has_unit, most = site.has("scale_unit"), _most_depth(site)
        return {**e2m1_constants(site.attributes, most, has_unit=has_unit), "E2M1": True}
    return {**_weight_constants(site), "E2M1": False}


def _most_depth(site: Site) -> int:
    """Channels that a program may multiply at once."""
    return 32 if site.dtypes["x"] == "f32" else CHANNELS


def _group(site: Site) -> int:
    """Channels that share a scale."""
    return int(site.attributes["group_size"]) or site.axes["K"]
