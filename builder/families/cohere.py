"""Cohere: LayerNorm, attention and MLP side by side, a scale of the logits."""

from trtc.builder.families import common
from trtc.builder.families.config import Config
from trtc.builder.families.dense import Dense, dense
from trtc.builder.spec import DecoderSpec

_PATTERN = 4
_DEFAULTS = {"logit_scale": 0.0625, "layer_norm_eps": 1e-5}


def cohere(config: Config, max_seq_len: int) -> DecoderSpec:
    """CohereForCausalLM."""
    config.require("use_qk_norm", (False,), False)
    config = config.with_defaults(**_DEFAULTS)
    return dense(
        config, max_seq_len, _differs(config, "cohere"), logit_scale=config.number("logit_scale")
    )


def cohere2(config: Config, max_seq_len: int) -> DecoderSpec:
    """Cohere2ForCausalLM: three layers of four have windows, the others no rotary embedding."""
    config = config.with_defaults(**_DEFAULTS, sliding_window=4096)
    pattern = config.integer("sliding_window_pattern", _PATTERN)

    def window(index: int) -> int | None:
        default = common.SLIDING if (index + 1) % pattern else common.FULL
        return common.window_by_layer_type(config, index, default)

    return dense(
        config,
        max_seq_len,
        _differs(config, "cohere2"),
        window=window,
        has_rope=lambda index: window(index) is not None,
        logit_scale=config.number("logit_scale"),
    )


def _differs(config: Config, family: str) -> Dense:
    bias = config.flag("attention_bias", False)
    return Dense(
        family,
        theta=500000.0 if family == "cohere" else 10000.0,
        interleaved=True,
        qkv_bias=bias,
        o_bias=bias,
        norms=common.PARALLEL_NORMS,
        style=common.NormStyle("layer_norm_eps", centered=True),
        parallel=True,
        tied=True,
    )
