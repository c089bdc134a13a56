"""Which function lowers which operator for a GPU: a literal table, imported on demand.

The modules import Triton, which is there where kernels are compiled and nowhere else.
"""

from collections.abc import Mapping

from trtc.plugins.gpu.lowering import Lower


def lowerings() -> Mapping[str, Lower]:
    """Operator -> its `lower`."""
    from trtc.plugins.add import cuda as add
    from trtc.plugins.all_gather import cuda as all_gather
    from trtc.plugins.all_reduce import cuda as all_reduce
    from trtc.plugins.causal_conv import cuda as causal_conv
    from trtc.plugins.embedding import cuda as embedding
    from trtc.plugins.expanded_latent_attention import cuda as expanded_latent_attention
    from trtc.plugins.fused_linear import cuda as fused_linear
    from trtc.plugins.gated_delta import cuda as gated_delta
    from trtc.plugins.gated_linear import cuda as gated_linear
    from trtc.plugins.gather_columns import cuda as gather_columns
    from trtc.plugins.gather_rows import cuda as gather_rows
    from trtc.plugins.head_linear import cuda as head_linear
    from trtc.plugins.index_write import cuda as index_write
    from trtc.plugins.latent_attention import cuda as latent_attention
    from trtc.plugins.latent_kv_write import cuda as latent_kv_write
    from trtc.plugins.layer_inputs import cuda as layer_inputs
    from trtc.plugins.linear import cuda as linear
    from trtc.plugins.mamba1 import cuda as mamba1
    from trtc.plugins.mamba2 import cuda as mamba2
    from trtc.plugins.moe import cuda as moe
    from trtc.plugins.paged_attention import cuda as paged_attention
    from trtc.plugins.quantize import cuda as quantize
    from trtc.plugins.rms_norm import cuda as rms_norm
    from trtc.plugins.rms_scale import cuda as rms_scale
    from trtc.plugins.rope import cuda as rope
    from trtc.plugins.rope_kv_write import cuda as rope_kv_write
    from trtc.plugins.select_tokens import cuda as select_tokens
    from trtc.plugins.short_conv import cuda as short_conv
    from trtc.plugins.swiglu import cuda as swiglu

    return {
        "add": add.lower,
        "all_gather": all_gather.lower,
        "all_reduce": all_reduce.lower,
        "causal_conv": causal_conv.lower,
        "embedding": embedding.lower,
        "expanded_latent_attention": expanded_latent_attention.lower,
        "fused_linear": fused_linear.lowering(rms_norm.lower, swiglu.lower),
        "gated_delta": gated_delta.lower,
        "gated_linear": gated_linear.lowering(swiglu.lower, quantize.lower),
        "gather_columns": gather_columns.lower,
        "gather_rows": gather_rows.lower,
        "head_linear": head_linear.lower,
        "index_write": index_write.lower,
        "latent_attention": latent_attention.lower,
        "latent_kv_write": latent_kv_write.lower,
        "layer_inputs": layer_inputs.lower,
        "linear": linear.lower,
        "mamba1": mamba1.lower,
        "mamba2": mamba2.lower,
        "moe": moe.lower,
        "paged_attention": paged_attention.lower,
        "quantize": quantize.lower,
        "rms_norm": rms_norm.lower,
        "rms_scale": rms_scale.lower,
        "rope": rope.lower,
        "rope_kv_write": rope_kv_write.lower,
        "select_tokens": select_tokens.lower,
        "short_conv": short_conv.lower,
        "swiglu": swiglu.lower,
    }
