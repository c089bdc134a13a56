"""GLM-4.7-Flash: DeepSeek-V3's layers."""

from trtc.builder.families import common
from trtc.builder.families.config import Config
from trtc.builder.families.deepseek import biased_router, latent_mixture
from trtc.builder.spec import DecoderSpec

_DEFAULTS = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1536,
    "routed_scaling_factor": 1.8,
    "rms_norm_eps": 1e-5,
}
_DENSE, _SPARSE = "dense", "sparse"


def glm4_moe_lite(config: Config, max_seq_len: int) -> DecoderSpec:
    """Glm4MoeLiteForCausalLM."""
    config = config.with_defaults(**_DEFAULTS)
    kinds = common.types_of_layers(
        config, "mlp_layer_types", (_DENSE, _SPARSE), f"trtc knows {_DENSE} and {_SPARSE}"
    )
    return latent_mixture(
        config,
        "glm4_moe_lite",
        max_seq_len,
        biased_router,
        is_dense=None if kinds is None else lambda index: kinds[index] == _DENSE,
    )
