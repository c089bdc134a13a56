"""SmolLM3: Llama with no rotary embedding in every fourth layer."""

from trtc.builder.families import common
from trtc.builder.families.config import Config, shown
from trtc.builder.families.dense import Dense, dense
from trtc.builder.spec import DecoderSpec
from trtc.protos.errors import CheckpointError

_INTERVAL = 4


def smollm3(config: Config, max_seq_len: int) -> DecoderSpec:
    """SmolLM3ForCausalLM."""
    bias = config.flag("attention_bias", False)
    has_rope = _has_rope(config)
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


def _has_rope(config: Config) -> tuple[bool, ...]:
    """Of each layer: `no_rope_layers` has 1 where there is a rotary embedding.

    Raises:
        CheckpointError: it has too few layers, or something else than 0 and 1.
    """
    layers = config.integer("num_hidden_layers")
    given = config.sequence("no_rope_layers")
    if given is None:
        interval = config.integer("no_rope_layer_interval", _INTERVAL)
        return tuple((index + 1) % interval != 0 for index in range(layers))
    if len(given) < layers:
        raise CheckpointError(
            f"names {len(given)} layers of {layers}", field="config.json: no_rope_layers"
        )
    for one in given:
        if one not in (0, 1):
            raise CheckpointError(
                f"has {shown(one)}, not 0 or 1", field="config.json: no_rope_layers"
            )
    return tuple(bool(one) for one in given)
