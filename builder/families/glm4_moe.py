"""GLM-4.5, 4.6 and 4.7: routed experts beside a shared one, after a few dense layers."""

import dataclasses

from trtc.builder.families import common, mixture
from trtc.builder.families.config import Config
from trtc.builder.families.rope import rope_spec
from trtc.builder.spec import ChoiceBias, DecoderSpec, DenseMlpSpec, LayerSpec, MoeMlpSpec

_DEFAULTS = {
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1408,
}


def glm4_moe(config: Config, max_seq_len: int) -> DecoderSpec:
    """Glm4MoeForCausalLM."""
    config = config.with_defaults(**_DEFAULTS)
    dim = common.head_dim(config)
    rope = rope_spec(config, dim, max_seq_len)
    bias = config.flag("attention_bias", False)
    has_norms = config.flag("use_qk_norm", False)

    def layer(index: int, prefix: str) -> LayerSpec:
        attention = common.attention(
            config, prefix, rope, dim=dim, qkv_bias=bias, qk_norm="head" if has_norms else None
        )
        return common.layer_spec(config, prefix, attention, _mlp(config, index, f"{prefix}.mlp"))

    spec = common.decoder(config, "glm4_moe", layer)
    # The layer of multi-token prediction lies behind the others.
    extra = rf"model\.layers\.{len(spec.layers)}\..*"
    return dataclasses.replace(spec, ignored_tensors=(*spec.ignored_tensors, extra))


def _mlp(config: Config, index: int, prefix: str) -> DenseMlpSpec | MoeMlpSpec:
    act = common.activation(config)
    if index < config.integer("first_k_dense_replace", 1, least=0):
        return common.gated_mlp(config, prefix, config.integer("intermediate_size"), act)
    number = config.integer("n_routed_experts", 128)
    bias = ChoiceBias(f"{prefix}.gate.e_score_correction_bias")
    router = mixture.sigmoid_router(config, f"{prefix}.gate", number, bias, epsilon=1e-20)
    return mixture.routed_and_shared(config, prefix, router)
