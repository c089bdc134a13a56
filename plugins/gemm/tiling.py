"""Shared parts of the GEMM kernels in CUDA C++: distribution of tiles of the weight's rows over
thread blocks, and macros."""

from trtc.plugins.gemm.mixed_input_tactics import Weight
from trtc.plugins.gpu.arch import SM_90
from trtc.plugins.gpu.lowering import Site
from trtc.plugins.gpu.sources import CPP_TYPES
from trtc.plugins.gpu.triton_launch import count_index

GROUP_ROWS = 64
"""Of the weight, that four warps multiply."""
GROUP_THREADS = 128
FEW_TILES = 32
"""Of a weight: up to so many are divided among the blocks of clusters."""
_CLUSTERS = (1, 2, 4, 8)
"""Blocks of a cluster."""
_BLOCKS_OF_FEW_TILES = 96
"""At most. More in clusters may not all run at once: those of a cluster run in one GPC."""
OPTIONAL = ("weight_scale", "input_scale", "bias", "residual", "row_scale")
"""Inputs of products of floats, in the order of their kernels' parameters."""

Macros = dict[str, int | float | str]


def shape(columns: int) -> str:
    """How many SMs of an H200 tiles of 64 rows keep busy: half of them at most, all at most, or
    more."""
    tiles = -(-columns // GROUP_ROWS)
    if tiles <= SM_90.multiprocessors // 2:
        return "narrow"
    return "medium" if tiles <= SM_90.multiprocessors else "wide"


def blocks_of_tile(tiles: int, parts: int) -> int:
    """Blocks of a cluster that share each of FEW_TILES at most, of which so many have a part."""
    most = max(min(parts, _BLOCKS_OF_FEW_TILES // tiles), 1)
    return max(blocks for blocks in _CLUSTERS if blocks <= most)


def even_clusters(items: int, at_once: int) -> int:
    """So many clusters that all take the same number of items, or nearly, if `at_once` run."""
    rounds = -(-items // at_once)
    return -(-items // rounds)


def float_macros(site: Site) -> Macros:
    """Of skinny.cu and streamed.cu: sizes, types, and what is done to a sum."""
    return {
        "N": site.axes["N"],
        "K": site.axes["K"],
        "E4M3": int(site.dtypes["weight"] == "f8e4m3"),
        "OUT_STRIDE": site.strides["out"],
        "RESIDUAL_STRIDE": site.strides.get("residual", 0),
        "OUT_F32": int(site.dtypes["out"] == "f32"),
        "RESIDUAL_F32": int(site.dtypes.get("residual") == "f32"),
        **{f"HAS_{name.upper()}": int(site.has(name)) for name in OPTIONAL},
        "ROW_SCALE_STRIDE": site.strides.get("row_scale", 0),
        "SOFTCAP": float(site.attributes["softcap"]),
        "COUNT": count_index(site.rows),
    }


def _codebook(site: Site) -> int:
    """As plugins/gemm/codebook.cuh has them; 0: nibbles and bytes are integers."""
    if site.attributes["weight_dtype"] == "f4e2m1":
        return 3 if site.has("scale_unit") else 2
    return int(site.attributes["weight_dtype"] == "iq4")


def integer_macros(site: Site, weight: Weight) -> Macros:
    """The same of mixed_input.cu and mixed_input_sm90.cu."""
    return {
        "N": weight.columns,
        "K": weight.depth,
        "BYTES": int(weight.bits == 8),
        "SIX_BITS": int(weight.bits == 6),
        "GROUP": weight.group_size,
        "GROUPS": weight.depth // weight.group_size,
        "X_STRIDE": site.strides["x"],
        "OUT_STRIDE": site.strides["out"],
        "RESIDUAL_STRIDE": site.strides.get("residual", 0),
        "OUT_TYPE": CPP_TYPES[site.dtypes["out"]],
        "RESIDUAL_TYPE": CPP_TYPES[site.dtypes.get("residual", "f32")],
        "CODEBOOK": _codebook(site),
        "HAS_UNIT": int(site.has("scale_unit")),
        "SIGNED": int(site.attributes["weight_dtype"] in ("i4", "i8")),
        "HAS_ZERO": int(site.has("weight_zero")),
        "HAS_BIAS": int(site.has("bias")),
        "HAS_RESIDUAL": int(site.has("residual")),
        "SOFTCAP": float(site.attributes["softcap"]),
        "COUNT": count_index(site.rows),
    }
