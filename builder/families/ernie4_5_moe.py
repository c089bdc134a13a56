"""ERNIE 4.5 with experts: a softmax router with a bias that only chooses, shared experts."""

from trtc.builder.families import common, mixture
from trtc.builder.families.config import Config
from trtc.builder.families.rope import rope_spec
from trtc.builder.spec import (
    ChoiceBias,
    DecoderSpec,
    DenseMlpSpec,
    LayerSpec,
    LinearSpec,
    MoeMlpSpec,
    RouterSpec,
)

_DEFAULTS = {"rms_norm_eps": 1e-5, "moe_intermediate_size": 1536}


def ernie4_5_moe(config: Config, max_seq_len: int) -> DecoderSpec:
    """Ernie4_5_MoeForCausalLM."""
    config = config.with_defaults(**_DEFAULTS, num_experts_per_tok=config.integer("moe_k", 6))
    dim = common.head_dim(config)
    rope = rope_spec(config, dim, max_seq_len, default_theta=500000.0)
    # It would give the lm_head a bias too, which trtc does not have.
    config.require("use_bias", (False,), False)

    def layer(index: int, prefix: str) -> LayerSpec:
        attention = common.attention(config, prefix, rope, dim=dim, interleaved=True)
        return common.layer_spec(config, prefix, attention, _mlp(config, index, f"{prefix}.mlp"))

    return common.decoder(config, "ernie4_5_moe", layer, tied_by_default=True)


def _has_experts(config: Config, index: int) -> bool:
    first = config.integer("moe_layer_start_index", 1, least=0)
    last = config.integer("moe_layer_end_index", -1, least=-1)
    last = config.integer("num_hidden_layers") - 1 if last == -1 else last
    interval = config.integer("moe_layer_interval", 1)
    return (index + 1) % interval == 0 and first <= index <= last


def _mlp(config: Config, index: int, prefix: str) -> DenseMlpSpec | MoeMlpSpec:
    act = common.activation(config)
    if not _has_experts(config, index):
        width = config.integer("intermediate_size")
        return common.gated_mlp(config, prefix, width, act)
    width = config.integer("moe_intermediate_size")
    number = config.integer("moe_num_experts", 64)
    experts = MoeMlpSpec(
        RouterSpec(
            LinearSpec(f"{prefix}.gate", config.integer("hidden_size"), number),
            mixture.experts_per_token(config, number),
            choice_bias=ChoiceBias(f"{prefix}.moe_statics.e_score_correction_bias", is_row=True),
            # Transformers divides by at least this; probabilities sum to far more.
            epsilon=config.number("moe_norm_min", 1e-12),
        ),
        mixture.gated_experts(config, prefix, number, width),
    )
    shared = config.integer("moe_num_shared_experts", 2, least=0)
    if shared == 0:
        return experts
    return mixture.with_shared_expert(
        experts,
        common.gated_mlp(config, f"{prefix}.shared_experts", width * shared, act),
    )
