"""SmolLM3: Llama with no rotary embedding in every fourth layer."""

from trtc.builder.families import common
from trtc.builder.families.config import Config
from trtc.builder.families.dense import Dense, dense
from trtc.builder.spec import DecoderSpec


def smollm3(config: Config, max_seq_len: int) -> DecoderSpec:
    """SmolLM3ForCausalLM."""
    bias = config.flag("attention_bias", False)
    has_rope = common.rope_layers(config)
    windowed = config.flag("use_sliding_window", False) and config.get("sliding_window") is not None

    def window(index: int) -> int | None:
        if not windowed:
            return None
        default = common.FULL if has_rope[index] else common.SLIDING
        return common.window_by_layer_type(config, index, default)

    return dense(
        config,
        max_seq_len,
        Dense(
            "smollm3",
            theta=2000000.0,
            qkv_bias=bias,
            o_bias=bias,
            mlp_bias=config.flag("mlp_bias", False),
            tied=True,
        ),
        window=window,
        has_rope=has_rope.__getitem__,
    )
