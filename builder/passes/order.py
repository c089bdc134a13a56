"""The passes of each target, in order."""

from collections.abc import Iterator

from trtc.builder.passes.base import Pass
from trtc.builder.passes.byte_scales import BYTE_SCALES
from trtc.builder.passes.compact_weights import COMPACT_WEIGHTS
from trtc.builder.passes.dequantize_groups import DEQUANTIZE_GROUPS
from trtc.builder.passes.drop_e4m3_rounding import DROP_E4M3_ROUNDING
from trtc.builder.passes.expand_latents import EXPAND_LATENTS
from trtc.builder.passes.fill_kv_scales import FILL_KV_SCALES
from trtc.builder.passes.fold_weight_quantization import FOLD_WEIGHT_QUANTIZATION
from trtc.builder.passes.fuse_add_norm import FUSE_ADD_NORM
from trtc.builder.passes.fuse_gated_linear import FUSE_GATED_LINEAR
from trtc.builder.passes.fuse_linears import FUSE_LINEARS
from trtc.builder.passes.fuse_quantize import FUSE_QUANTIZE
from trtc.builder.passes.fuse_residual import FUSE_RESIDUAL
from trtc.builder.passes.fuse_rope_kv_write import FUSE_ROPE_KV_WRITE
from trtc.builder.passes.fuse_row_quantize import FUSE_ROW_QUANTIZE
from trtc.builder.passes.fuse_shared_expert import FUSE_SHARED_EXPERT
from trtc.builder.passes.gather_early import GATHER_EARLY
from trtc.builder.passes.join_columns import JOIN_COLUMNS
from trtc.builder.passes.lower_add import LOWER_ADD
from trtc.builder.passes.lower_embedding import LOWER_EMBEDDING
from trtc.builder.passes.lower_experts import LOWER_EXPERTS
from trtc.builder.passes.lower_gather_columns import LOWER_GATHER_COLUMNS
from trtc.builder.passes.lower_gather_rows import LOWER_GATHER_ROWS
from trtc.builder.passes.lower_linears import LOWER_LINEARS
from trtc.builder.passes.lower_norms import LOWER_NORMS
from trtc.builder.passes.lower_swiglu import LOWER_SWIGLU
from trtc.builder.passes.match_scale_types import MATCH_SCALE_TYPES
from trtc.builder.passes.merge_linears import MERGE_LINEARS, merge_linears_of
from trtc.builder.passes.pack_weights import PACK_WEIGHTS
from trtc.builder.passes.quantize_tables import QuantizeTables
from trtc.builder.passes.regroup_e4m3 import REGROUP_E4M3
from trtc.builder.passes.select_cpu_activation import SELECT_CPU_ACTIVATION
from trtc.builder.passes.shard import ShardOverRanks
from trtc.builder.passes.share_pre_scales import share_pre_scales
from trtc.builder.passes.share_quantize import SHARE_QUANTIZE
from trtc.builder.passes.split_attention import SPLIT_ATTENTION
from trtc.builder.passes.split_six_bits import SPLIT_SIX_BITS
from trtc.builder.passes.tile_weights import TILE_WEIGHTS
from trtc.builder.passes.verify_native import VERIFY_NATIVE
from trtc.builder.recipes import TensorReader
from trtc.quant.scheme import Scheme
from trtc.quant.site_format import BF16, DEFAULT_TABLES, FORMATS, TableFormats

NATIVE_PASSES: tuple[Pass, ...] = (
    # 1. Matrix products: everything that surrounds one becomes an input or attribute of it.
    FOLD_WEIGHT_QUANTIZATION,
    LOWER_LINEARS,
    SHARE_QUANTIZE,
    FUSE_SHARED_EXPERT,
    MERGE_LINEARS,
    JOIN_COLUMNS,
    # 2. The other operators, one for one.
    LOWER_EMBEDDING,
    LOWER_GATHER_ROWS,
    LOWER_GATHER_COLUMNS,
    FUSE_ROPE_KV_WRITE,
    LOWER_NORMS,
    LOWER_SWIGLU,
    # 3. Fusions that save a round trip through memory.
    FUSE_RESIDUAL,
    FUSE_ADD_NORM,
    LOWER_ADD,
    GATHER_EARLY,
    FUSE_QUANTIZE,
    # 4. Check that every node is lowered.
    VERIFY_NATIVE,
)
"""What the CPU and CUDA targets share: the source graph -> trtc's operators and Splits."""

INT8_GROUPS = FORMATS["int8_g128"]

_CUDA_PASSES = (
    EXPAND_LATENTS,
    FUSE_ROW_QUANTIZE,
    FUSE_GATED_LINEAR,
    BYTE_SCALES,
    TILE_WEIGHTS,
    SPLIT_SIX_BITS,
    FUSE_LINEARS,
)

TENSORRT_PASSES: tuple[Pass, ...] = (
    LOWER_EXPERTS,
    FILL_KV_SCALES,
    MATCH_SCALE_TYPES,
    SPLIT_ATTENTION,
)
"""TensorRT fuses standard operators and Q/DQ itself: it gets the source graph, made legal."""


def cpu_passes(
    scheme: Scheme,
    reader: TensorReader,
    *,
    exact_activations: bool,
    tables: TableFormats = DEFAULT_TABLES,
    exact_weights: bool = False,
) -> tuple[Pass, ...]:
    """The CPU target's list: packed weights and, unless asked for exact ones, bf16 weights in 12
    bits, and int8 activations for a narrow lm_head and for weights of 4 bits and of E4M3, which are
    stored as int8. `reader` compares vectors of scales, and reads nothing else.

    Args:
        tables: as `tables_on_cpu` gives them, where the caller leaves them to the target.
    """
    compact = (BYTE_SCALES,) if exact_weights else (BYTE_SCALES, COMPACT_WEIGHTS)
    pack = (*compact, PACK_WEIGHTS)
    narrow = QuantizeTables(tables_on_cpu(scheme, tables))
    share = (share_pre_scales(reader),) if scheme.pre_quant_scale else ()
    if exact_activations:
        return (*share, *NATIVE_PASSES, DEQUANTIZE_GROUPS, narrow, *pack)
    rounded = (REGROUP_E4M3, narrow, SELECT_CPU_ACTIVATION)
    return (*share, DROP_E4M3_ROUNDING, *NATIVE_PASSES, *rounded, *pack)


def tables_on_cpu(scheme: Scheme, tables: TableFormats) -> TableFormats:
    """What the CPU target makes of the lm_head and the embeddings: of quantised models an int8
    lm_head where nothing else is asked for."""
    head = INT8_GROUPS if scheme.dtype == "bf16" != scheme.weight else BF16
    return TableFormats(tables.lm_head or head, tables.embedding or BF16)


def cuda_passes(
    scheme: Scheme,
    reader: TensorReader,
    ranks: int = 1,
    *,
    ep: bool = False,
    tables: TableFormats = DEFAULT_TABLES,
) -> tuple[Pass, ...]:
    """The CUDA target's list: activations are exact, and have their rows' scales from the operators
    that make them, tables are narrow, each of several ranks gets its share, both products of a
    gated MLP stay on the chip, and 4-bit weights come to lie in tiles, in one call with the norms
    and gates beside them.

    Args:
        ep: whether each of several ranks has whole experts.
        tables: as `tables_on_cuda` gives them, where the caller leaves them to the target.
    """
    share = (share_pre_scales(reader),) if scheme.pre_quant_scale else ()
    narrow = QuantizeTables(tables_on_cuda(scheme, tables))
    if ranks == 1:
        return (*share, *NATIVE_PASSES, narrow, *_CUDA_PASSES)
    return (*share, *_sharded_passes(ranks), narrow, ShardOverRanks(ranks, ep), *_CUDA_PASSES)


def _sharded_passes(ranks: int) -> Iterator[Pass]:
    """NATIVE_PASSES of a model that several ranks share. Each has a part of the sum that the
    residual is added to once: a norm does."""
    for step in NATIVE_PASSES:
        if step is MERGE_LINEARS:
            yield merge_linears_of(ranks)
        elif step is not FUSE_RESIDUAL:
            yield step


def tables_on_cuda(scheme: Scheme, tables: TableFormats) -> TableFormats:
    """As `tables_on_cpu` for the CUDA target, where the lm_head is int8 beside weights of 4 and 6
    bits, whose steps of few sequences it is a fifth of. From 128 rows on cuBLASLt's bf16 product is
    faster."""
    head = INT8_GROUPS if scheme.weight in ("i6", "i4", "iq4") else BF16
    return TableFormats(tables.lm_head or head, tables.embedding or BF16)
