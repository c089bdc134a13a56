"""Qwen2-MoE and Qwen1.5-MoE: Qwen2 with routed experts and one shared expert, which has a gate."""

from trtc.builder.families import common, mixture
from trtc.builder.families.config import Config
from trtc.builder.families.rope import rope_spec
from trtc.builder.spec import DecoderSpec, DenseMlpSpec, LayerSpec, MoeMlpSpec

_DEFAULTS = {
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_experts_per_tok": 4,
}


def qwen2_moe(config: Config, max_seq_len: int) -> DecoderSpec:
    """Qwen2MoeForCausalLM."""
    config = config.with_defaults(**_DEFAULTS)
    dim = common.head_dim(config)
    rope = rope_spec(config, dim, max_seq_len)
    bias = config.flag("qkv_bias", True)

    def layer(index: int, prefix: str) -> LayerSpec:
        attention = common.attention(
            config, prefix, rope, dim=dim, qkv_bias=bias, window=_window(config, index)
        )
        return common.layer_spec(config, prefix, attention, _mlp(config, index, f"{prefix}.mlp"))

    return common.decoder(config, "qwen2_moe", layer)


def _window(config: Config, index: int) -> int | None:
    """Where no `layer_types` are, every other one of the lower layers has a window."""
    if not config.flag("use_sliding_window", False):
        return None
    lower = index < config.integer("max_window_layers", 28, least=0) and index % 2 == 0
    return common.window_by_layer_type(config, index, common.SLIDING if lower else common.FULL)


def _mlp(config: Config, index: int, prefix: str) -> DenseMlpSpec | MoeMlpSpec:
    act = common.activation(config)
    if not mixture.is_sparse_layer(config, index):
        return common.gated_mlp(config, prefix, config.integer("intermediate_size"), act)
    width = config.integer("moe_intermediate_size")
    return mixture.with_shared_expert(
        mixture.softmax_experts(config, prefix, width, experts=60),
        common.gated_mlp(
            config,
            f"{prefix}.shared_expert",
            config.integer("shared_expert_intermediate_size"),
            act,
        ),
        gate=f"{prefix}.shared_expert_gate",
    )
