"""GLM-4: the rotary embedding turns half of a head, neighbours; gate and up are one tensor."""

from trtc.builder.families import common
from trtc.builder.families.config import Config
from trtc.builder.families.rope import rope_spec
from trtc.builder.spec import DecoderSpec, LayerSpec

_DEFAULTS = {"head_dim": 128, "partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-07}


def glm(config: Config, max_seq_len: int) -> DecoderSpec:
    """GlmForCausalLM: norms before attention and MLP."""
    return _glm(config, "glm", max_seq_len, common.PRE_NORMS)


def glm4(config: Config, max_seq_len: int) -> DecoderSpec:
    """Glm4ForCausalLM: norms before and after."""
    return _glm(config, "glm4", max_seq_len, common.SANDWICH_NORMS)


def _glm(config: Config, family: str, max_seq_len: int, norms: common.NormNames) -> DecoderSpec:
    config = config.with_defaults(**_DEFAULTS)
    dim = common.head_dim(config)
    rope = rope_spec(config, dim, max_seq_len)
    bias = config.flag("attention_bias", True)

    def layer(_index: int, prefix: str) -> LayerSpec:
        attention = common.attention(config, prefix, rope, dim=dim, qkv_bias=bias, interleaved=True)
        return common.layer_spec(config, prefix, attention, common.fused_mlp(config, prefix), norms)

    return common.decoder(config, family, layer)
