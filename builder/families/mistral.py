"""Mistral: Llama with a sliding window on every layer."""

from trtc.builder.families import common
from trtc.builder.families.config import Config
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
