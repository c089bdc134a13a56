"""GLM-4.7-Flash: DeepSeek-V3's layers."""

from trtc.builder.families.config import Config
from trtc.builder.families.deepseek import biased_router, dense_layers, latent_mixture
from trtc.builder.spec import DecoderSpec

_DEFAULTS = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1536,
    "routed_scaling_factor": 1.8,
    "rms_norm_eps": 1e-5,
}


def glm4_moe_lite(config: Config, max_seq_len: int) -> DecoderSpec:
    """Glm4MoeLiteForCausalLM."""
    config = config.with_defaults(**_DEFAULTS)
    return latent_mixture(
        config, "glm4_moe_lite", max_seq_len, biased_router, is_dense=dense_layers(config)
    )
