"""Code World Model: Llama with windows on three layers of four."""

from trtc.builder.families import common
from trtc.builder.families.config import Config
from trtc.builder.families.dense import Dense, dense
from trtc.builder.spec import DecoderSpec

_PATTERN = 4
_THETA = 1000000.0
_ROPE_WHEN_UNSAID = {
    "rope_type": "llama3",
    "rope_theta": _THETA,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def cwm(config: Config, max_seq_len: int) -> DecoderSpec:
    """CwmForCausalLM: the first layer of every four attends to all tokens."""
    config = config.with_defaults(head_dim=128, rms_norm_eps=1e-5, sliding_window=8192)
    if all(config.get(key) is None for key in ("rope_parameters", "rope_scaling", "rope_theta")):
        config = config.with_defaults(rope_parameters=_ROPE_WHEN_UNSAID)

    def window(index: int) -> int | None:
        kind = common.SLIDING if index % _PATTERN else common.FULL
        return common.window_by_layer_type(config, index, kind)

    differs = Dense("cwm", theta=_THETA, mlp_bias=config.flag("mlp_bias", False))
    return dense(config, max_seq_len, differs, window=window)
