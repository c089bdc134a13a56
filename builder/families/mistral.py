"""Mistral and Ministral: Llama with a sliding window on every layer, or on some."""

from trtc.builder.families import common
from trtc.builder.families.config import Config
from trtc.builder.families.dense import Dense, dense
from trtc.builder.families.rope import rope_spec
from trtc.builder.spec import DecoderSpec, LayerSpec

_WINDOW_WHEN_UNSAID = 4096
"""Mistral 7B v0.1's; later models say null."""


def mistral(config: Config, max_seq_len: int) -> DecoderSpec:
    """MistralForCausalLM."""
    dim = common.head_dim(config)
    rope = rope_spec(config, dim, max_seq_len)
    act = common.activation(config)
    intermediate = config.integer("intermediate_size")
    window = (
        config.optional_integer("sliding_window")
        if "sliding_window" in config.fields
        else _WINDOW_WHEN_UNSAID
    )

    def layer(_index: int, prefix: str) -> LayerSpec:
        return common.layer_spec(
            config,
            prefix,
            common.attention(config, prefix, rope, dim=dim, window=window),
            common.gated_mlp(config, f"{prefix}.mlp", intermediate, act),
        )

    return common.decoder(config, "mistral", layer)


def ministral(config: Config, max_seq_len: int) -> DecoderSpec:
    """MinistralForCausalLM: `layer_types` say which layers have a window."""
    if "sliding_window" not in config.fields:
        config = config.with_defaults(sliding_window=_WINDOW_WHEN_UNSAID)
    windowed = config.optional_integer("sliding_window") is not None
    kind = common.SLIDING if windowed else common.FULL
    return dense(
        config,
        max_seq_len,
        Dense("ministral"),
        window=lambda index: common.window_by_layer_type(config, index, kind),
    )
