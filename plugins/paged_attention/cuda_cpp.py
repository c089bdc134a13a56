"""Macros and parameters that the CUDA C++ kernels of paged_attention share."""

from collections.abc import Sequence

from trtc.plugins.attention.split_kv import CUDA
from trtc.plugins.gpu.lowering import DIMS, SCRATCH, Grid, Launch, Site, TileMap
from trtc.plugins.gpu.sources import CPP_TYPES, CudaSource, KernelParameter
from trtc.plugins.kv_pool import code_width
from trtc.protos.dtypes import DTYPES

_HEAD_DIMS = (16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 256)
"""Whole products, and sums that fit in the registers of every SM."""
_COPIED_BYTES = 16
"""Bytes that are copied to shared memory at once."""
_PAGE_KEYS = 8
"""Keys that are looked up together."""
OPTIONAL = ("k_scale", "v_scale", "pre_scale", "out_scale", "sinks")
PARTIAL, STATS, COUNTER = "partial", "stats", "counter"
"""Scratch buffers: f32 [sequences, splits, heads, head_dim], f32 pairs (largest score, sum of
weights) beside it, and an i32."""
_SCRATCH_TYPES = {PARTIAL: "f32", STATS: "f32", COUNTER: "i32"}
_LONG_ROW_BYTES = 256


def supports(site: Site) -> bool:
    """Whether there are CUDA C++ kernels for a site."""
    return (
        site.dtypes["q"] == "bf16"
        and site.dtypes["pool"] in ("bf16", "f8e4m3", "i8", "u8")
        and site.axes["head_dim"] in _HEAD_DIMS
        and row_bytes(site) % _COPIED_BYTES == 0
        and site.page_size % _PAGE_KEYS == 0
    )


def group(site: Site) -> int:
    """Query heads of a KV head."""
    return int(site.attributes["num_heads"]) // site.axes["num_kv_heads"]


def row_bytes(site: Site) -> int:
    """Bytes of one head's key in the pool."""
    dtype = site.dtypes["pool"]
    return DTYPES[dtype].num_bytes(code_width(dtype, site.axes["head_dim"]))


def scale_bytes(site: Site) -> int:
    """Bytes of a head's own scale in the pool, 0 or 4."""
    dtype = site.dtypes["pool"]
    return DTYPES[dtype].num_bytes(site.axes["stored_width"]) - row_bytes(site)


def steps_per_split(site: Site) -> int:
    """Steps of the axis "splits" in the shortest split: twice as many where rows of K and V are
    short, for as many bytes to read beside the sums that a split leaves behind."""
    return 1 if row_bytes(site) >= _LONG_ROW_BYTES else 2


def max_splits(site: Site, times: int = 1) -> int:
    """Splits of the longest sequence, where a split is `times` as long as the shortest."""
    most = CUDA.most(site.limits.max_seq_len, int(site.attributes["window"]))
    return -(-most // (times * steps_per_split(site)))


def constants(site: Site, times: int = 1) -> dict[str, int | float | str]:
    """The macros of context.cuh, where a split is `times` as long as the shortest."""
    return {
        "NUM_HEADS": int(site.attributes["num_heads"]),
        "NUM_KV_HEADS": site.axes["num_kv_heads"],
        "HEAD_DIM": site.axes["head_dim"],
        "POOL": CPP_TYPES[site.dtypes["pool"]],
        "SCALE_BYTES": scale_bytes(site),
        "OUT": CPP_TYPES[site.dtypes["out"]],
        "PAGE_SIZE": site.page_size,
        "TABLE_WIDTH": site.table_width,
        "Q_STRIDE": site.strides["q"],
        "OUT_STRIDE": site.strides["out"],
        "SCALE": float(site.attributes["scale"]),
        "WINDOW": int(site.attributes["window"]),
        "CHUNKED": int(site.attributes["chunked"]),
        "SOFTCAP": float(site.attributes["softcap"]),
        "SPLIT_KEYS": CUDA.keys * times * steps_per_split(site),
        "MAX_SPLITS": max_splits(site, times),
        **{f"HAS_{name.upper()}": int(site.has(name)) for name in OPTIONAL},
    }


def parameters(site: Site, names: Sequence[str]) -> tuple[KernelParameter, ...]:
    """Those of `names` that the site has: parameters of the operator, DIMS, scratch buffers."""
    dtypes = {DIMS: "i32", **_SCRATCH_TYPES, **site.dtypes}
    return tuple(KernelParameter(name, dtypes[name]) for name in names if name in dtypes)


def launch(site: Site, source: CudaSource, grid: Grid, maps: tuple[TileMap, ...] = ()) -> Launch:
    """A launch whose arguments are called as the kernel's parameters are, but for those of `maps`,
    which come last."""
    addresses = source.parameters[: len(source.parameters) - len(maps)]
    return Launch(
        kernel=source,
        arguments=tuple(
            SCRATCH + one.name if one.name in _SCRATCH_TYPES else one.name for one in addresses
        ),
        grid=grid,
        overlaps=site.arch.has_pdl,
        maps=maps,
    )
