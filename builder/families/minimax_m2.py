"""MiniMax-M2: routed experts on every layer, norms over all heads of q and of k."""

from trtc.builder.families import common, mixture
from trtc.builder.families.config import Config
from trtc.builder.families.rope import rope_spec
from trtc.builder.spec import ChoiceBias, DecoderSpec, LayerSpec, MoeMlpSpec


def minimax_m2(config: Config, max_seq_len: int) -> DecoderSpec:
    """MiniMaxM2ForCausalLM."""
    config.require("scoring_func", ("sigmoid",), "sigmoid")
    config.require("use_routing_bias", (True,), True)
    config.require("use_qk_norm", (True,), True)
    config.require("qk_norm_type", ("per_layer",), "per_layer")
    config.require("shared_intermediate_size", (0,), 0)
    config = config.with_defaults(head_dim=128, num_experts_per_tok=8)
    dim = common.head_dim(config)
    # Published configs give the rotated dimensions themselves.
    rotary = config.optional_integer("rotary_dim")
    if rotary is not None:
        config = config.with_defaults(partial_rotary_factor=rotary / dim)
    rope = rope_spec(config, dim, max_seq_len)

    def layer(_index: int, prefix: str) -> LayerSpec:
        attention = common.attention(config, prefix, rope, dim=dim, qk_norm="row")
        experts = _experts(config, f"{prefix}.block_sparse_moe")
        return common.layer_spec(config, prefix, attention, experts)

    return common.decoder(config, "minimax_m2", layer)


def _experts(config: Config, prefix: str) -> MoeMlpSpec:
    number = mixture.num_experts(config, 256)
    return MoeMlpSpec(
        mixture.sigmoid_router(
            config, f"{prefix}.gate", number, ChoiceBias(f"{prefix}.e_score_correction_bias")
        ),
        mixture.gated_experts(
            config, prefix, number, config.integer("intermediate_size"), mixture.NUMBERED
        ),
    )
