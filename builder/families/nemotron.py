"""Nemotron (Nemotron-4, Minitron) and Arcee's AFM: an MLP of squared ReLU without a gate."""

from trtc.builder.families import common
from trtc.builder.families.config import Config
from trtc.builder.families.dense import Dense, dense
from trtc.builder.spec import DecoderSpec

_NAMES = ("up_proj", "down_proj")


def nemotron(config: Config, max_seq_len: int) -> DecoderSpec:
    """NemotronForCausalLM: LayerNorm by weights plus 1; the rotary embedding turns half a head."""
    config = config.with_defaults(partial_rotary_factor=0.5, norm_eps=1e-5)
    style = common.NormStyle("norm_eps", unit_offset=True, centered=True, has_bias=True)
    return _squared(config, max_seq_len, "nemotron", style)


def arcee(config: Config, max_seq_len: int) -> DecoderSpec:
    """ArceeForCausalLM."""
    return _squared(config.with_defaults(rms_norm_eps=1e-5), max_seq_len, "arcee", common.RMS_NORM)


def _squared(config: Config, max_seq_len: int, family: str, style: common.NormStyle) -> DecoderSpec:
    bias, mlp_bias = config.flag("attention_bias", False), config.flag("mlp_bias", False)
    return dense(
        config,
        max_seq_len,
        Dense(family, qkv_bias=bias, o_bias=bias, style=style),
        mlp=lambda prefix: common.plain_mlp(config, prefix, "relu2", bias=mlp_bias, names=_NAMES),
    )
