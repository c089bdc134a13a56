"""Qwen2 and Qwen2.5: biases on q, k and v, optional windows on the upper layers."""

from trtc.builder.families import common
from trtc.builder.families.config import Config
from trtc.builder.families.rope import rope_spec
from trtc.builder.spec import DecoderSpec, LayerSpec


def qwen2(config: Config, max_seq_len: int) -> DecoderSpec:
    """Qwen2ForCausalLM."""
    dim = common.head_dim(config)
    rope = rope_spec(config, dim, max_seq_len)
    act = common.activation(config)
    intermediate = config.integer("intermediate_size")

    def layer(index: int, prefix: str) -> LayerSpec:
        window = qwen_window(config, index)
        return common.layer_spec(
            config,
            prefix,
            common.attention(config, prefix, rope, dim=dim, qkv_bias=True, window=window),
            common.gated_mlp(config, f"{prefix}.mlp", intermediate, act),
        )

    return common.decoder(config, "qwen2", layer)


def qwen_window(config: Config, index: int) -> int | None:
    """Qwen's rule: windows only with `use_sliding_window`, from layer `max_window_layers` on."""
    windowed = config.flag("use_sliding_window", False)
    if not windowed:
        return None
    first = config.integer("max_window_layers", 28, least=0)
    return common.window_by_layer_type(
        config, index, "sliding_attention" if index >= first else "full_attention"
    )
