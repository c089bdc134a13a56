"""OLMoE: routed experts on every layer, norms over all heads of q and of k."""

from trtc.builder.families import common
from trtc.builder.families.config import Config
from trtc.builder.families.rope import rope_spec
from trtc.builder.spec import DecoderSpec, LayerSpec, LinearSpec, MoeMlpSpec


def olmoe(config: Config, max_seq_len: int) -> DecoderSpec:
    """OlmoeForCausalLM."""
    config.require("clip_qkv", (None,), None)
    config = config.with_defaults(rms_norm_eps=1e-5)
    dim = common.head_dim(config)
    rope = rope_spec(config, dim, max_seq_len)
    bias = config.flag("attention_bias", False)

    def layer(_index: int, prefix: str) -> LayerSpec:
        attention = common.attention(
            config, prefix, rope, dim=dim, qkv_bias=bias, o_bias=bias, qk_norm="row"
        )
        return common.layer_spec(config, prefix, attention, _experts(config, f"{prefix}.mlp"))

    return common.decoder(config, "olmoe", layer)


def _experts(config: Config, prefix: str) -> MoeMlpSpec:
    act = common.activation(config)
    # Transformers 5 saves the older num_experts as num_local_experts.
    experts = config.optional_integer("num_local_experts") or config.integer("num_experts", 64)
    width = config.integer("intermediate_size")
    return MoeMlpSpec(
        router=LinearSpec(f"{prefix}.gate", config.integer("hidden_size"), experts),
        experts=tuple(
            common.gated_mlp(config, f"{prefix}.experts.{expert}", width, act)
            for expert in range(experts)
        ),
        top_k=config.integer("num_experts_per_tok", 8),
        renormalize=config.flag("norm_topk_prob", False),
    )
