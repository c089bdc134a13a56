"""gpt-oss: attention sinks, windows on every other layer, experts that are biased and clamped."""

from dataclasses import replace

from trtc.builder.families import common, mixture
from trtc.builder.families.config import Config
from trtc.builder.families.rope import rope_spec
from trtc.builder.spec import (
    DecoderSpec,
    DenseMlpSpec,
    LayerSpec,
    LinearSpec,
    MoeMlpSpec,
    OfExperts,
    RouterSpec,
)

_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""Where config.json has no rope parameters."""


def gpt_oss(config: Config, max_seq_len: int) -> DecoderSpec:
    """GptOssForCausalLM."""
    config.require("hidden_act", ("silu",), "silu")
    config.require("swiglu_alpha", (1.702,), 1.702)
    config = config.with_defaults(
        head_dim=64, rms_norm_eps=1e-5, sliding_window=128, max_position_embeddings=131072
    )
    if config.get("rope_scaling") is None:
        config = config.with_defaults(rope_parameters=_YARN)
    dim = common.head_dim(config)
    rope = rope_spec(config, dim, max_seq_len, default_theta=150000.0)
    bias = config.flag("attention_bias", True)

    def layer(index: int, prefix: str) -> LayerSpec:
        default_type = common.FULL if index % 2 else common.SLIDING
        attention = common.attention(
            config,
            prefix,
            rope,
            dim=dim,
            qkv_bias=bias,
            o_bias=bias,
            window=common.window_by_layer_type(config, index, default_type),
        )
        attention = replace(attention, sinks=f"{prefix}.self_attn.sinks")
        return common.layer_spec(config, prefix, attention, _experts(config, f"{prefix}.mlp"))

    return common.decoder(config, "gpt_oss", layer)


def _experts(config: Config, prefix: str) -> MoeMlpSpec:
    hidden, width = config.integer("hidden_size"), config.integer("intermediate_size")
    number = mixture.num_experts(config, 128)
    limit = config.number("swiglu_limit", 7.0)
    gate_up, down = f"{prefix}.experts.gate_up_proj", f"{prefix}.experts.down_proj"

    def expert(index: int) -> DenseMlpSpec:
        # Gate and up of a channel are neighbours.
        gates = OfExperts(index, number, 2 * width, first=0, step=2, transposed=True)
        downs = OfExperts(index, number, hidden, transposed=True)
        return DenseMlpSpec(
            gate=LinearSpec(gate_up, hidden, width, has_bias=True, of_experts=gates),
            up=LinearSpec(
                gate_up, hidden, width, has_bias=True, of_experts=replace(gates, first=1)
            ),
            down=LinearSpec(down, width, hidden, has_bias=True, of_experts=downs),
            activation="quick_gelu",
            limit=limit,
            up_offset=1.0,
        )

    return MoeMlpSpec(
        router=RouterSpec(
            LinearSpec(f"{prefix}.router", hidden, number, has_bias=True),
            mixture.experts_per_token(config, number, 4),
        ),
        experts=tuple(expert(index) for index in range(number)),
    )
