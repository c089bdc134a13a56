"""Every fused operator by name. A new one is a folder and a line here."""

from trtc.plugins.add.op import ADD
from trtc.plugins.all_gather.op import ALL_GATHER
from trtc.plugins.all_reduce.op import ALL_REDUCE
from trtc.plugins.attention_combine.op import ATTENTION_COMBINE
from trtc.plugins.attention_split.op import ATTENTION_SPLIT
from trtc.plugins.causal_conv.op import CAUSAL_CONV
from trtc.plugins.embedding.op import EMBEDDING
from trtc.plugins.expanded_latent_attention.op import EXPANDED_LATENT_ATTENTION
from trtc.plugins.fused_linear.op import FUSED_LINEAR
from trtc.plugins.gated_delta.op import GATED_DELTA
from trtc.plugins.gated_linear.op import GATED_LINEAR
from trtc.plugins.gather_columns.op import GATHER_COLUMNS
from trtc.plugins.gather_rows.op import GATHER_ROWS
from trtc.plugins.head_linear.op import HEAD_LINEAR
from trtc.plugins.index_write.op import INDEX_WRITE
from trtc.plugins.kv_write.op import KV_WRITE
from trtc.plugins.latent_attention.op import LATENT_ATTENTION
from trtc.plugins.latent_kv_write.op import LATENT_KV_WRITE
from trtc.plugins.layer_inputs.op import LAYER_INPUTS
from trtc.plugins.linear.op import LINEAR
from trtc.plugins.mamba1.op import MAMBA1
from trtc.plugins.mamba2.op import MAMBA2
from trtc.plugins.moe.op import MOE
from trtc.plugins.op import FusedOp
from trtc.plugins.paged_attention.op import PAGED_ATTENTION
from trtc.plugins.quantize.op import QUANTIZE
from trtc.plugins.rms_norm.op import RMS_NORM
from trtc.plugins.rms_scale.op import RMS_SCALE
from trtc.plugins.rope.op import ROPE
from trtc.plugins.rope_kv_write.op import ROPE_KV_WRITE
from trtc.plugins.select_tokens.op import SELECT_TOKENS
from trtc.plugins.short_conv.op import SHORT_CONV
from trtc.plugins.swiglu.op import SWIGLU

REGISTRY: dict[str, FusedOp] = {
    op.name: op
    for op in (
        EMBEDDING,
        RMS_NORM,
        RMS_SCALE,
        LINEAR,
        ROPE,
        ROPE_KV_WRITE,
        KV_WRITE,
        PAGED_ATTENTION,
        ATTENTION_SPLIT,
        ATTENTION_COMBINE,
        LATENT_KV_WRITE,
        INDEX_WRITE,
        SELECT_TOKENS,
        LATENT_ATTENTION,
        EXPANDED_LATENT_ATTENTION,
        HEAD_LINEAR,
        LAYER_INPUTS,
        SHORT_CONV,
        CAUSAL_CONV,
        GATED_DELTA,
        MAMBA1,
        MAMBA2,
        SWIGLU,
        GATED_LINEAR,
        FUSED_LINEAR,
        MOE,
        QUANTIZE,
        GATHER_COLUMNS,
        GATHER_ROWS,
        ADD,
        ALL_REDUCE,
        ALL_GATHER,
    )
}
