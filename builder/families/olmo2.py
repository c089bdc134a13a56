"""OLMo 2 and 3: norms after attention and MLP, and over all heads of q and of k."""

from trtc.builder.families import common
from trtc.builder.families.config import Config
from trtc.builder.families.dense import Dense, dense
from trtc.builder.families.rope import rope_by_layer_type
from trtc.builder.spec import DecoderSpec, RopeSpec

_PATTERN = 4
_THETA_OF_OLMO3 = 500000.0


def olmo2(config: Config, max_seq_len: int) -> DecoderSpec:
    """Olmo2ForCausalLM."""
    config = config.with_defaults(rms_norm_eps=1e-5)
    return dense(config, max_seq_len, _differs(config, "olmo2"))


def olmo3(config: Config, max_seq_len: int) -> DecoderSpec:
    """Olmo3ForCausalLM: windows on three layers of four, whose rotary embedding is not scaled."""
    config = config.with_defaults(rms_norm_eps=1e-5, sliding_window=4096)
    dim = common.head_dim(config)
    ropes = {
        kind: rope_by_layer_type(config, kind, dim, max_seq_len, default_theta=_THETA_OF_OLMO3)
        for kind in (common.FULL, common.SLIDING)
    }

    def kind(index: int) -> str:
        return common.SLIDING if (index + 1) % _PATTERN else common.FULL

    def rope(index: int) -> RopeSpec:
        return ropes[common.layer_type(config, index, kind(index))]

    return dense(
        config,
        max_seq_len,
        _differs(config, "olmo3"),
        window=lambda index: common.window_by_layer_type(config, index, kind(index)),
        rope=rope,
    )


def _differs(config: Config, family: str) -> Dense:
    bias = config.flag("attention_bias", False)
    return Dense(family, qkv_bias=bias, o_bias=bias, qk_norm="row", norms=common.POST_NORMS)
