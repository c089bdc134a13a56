"""EXAONE 4: norms after attention and MLP; windows with rotary embedding beside layers without
either."""

from trtc.builder.families import common
from trtc.builder.families.config import Config
from trtc.builder.families.dense import Dense, dense
from trtc.builder.spec import DecoderSpec

_PATTERN = 4
_WINDOW_WHEN_UNSAID = 4096


def exaone4(config: Config, max_seq_len: int) -> DecoderSpec:
    """Exaone4ForCausalLM."""
    config = config.with_defaults(rms_norm_eps=1e-5)
    if "sliding_window" not in config.fields:
        config = config.with_defaults(sliding_window=_WINDOW_WHEN_UNSAID)
    windowed = config.optional_integer("sliding_window") is not None

    def window(index: int) -> int | None:
        if not windowed:
            return None
        return common.window_by_layer_type(config, index, _kind(config, index))

    return dense(
        config,
        max_seq_len,
        Dense("exaone4", qk_norm="head", norms=common.POST_NORMS),
        window=window,
        has_rope=lambda index: not windowed or window(index) is not None,
    )


def _kind(config: Config, index: int) -> str:
    """`LLLG`, or how many layers make one that attends to all tokens."""
    pattern = config.get("sliding_window_pattern")
    if isinstance(pattern, str):
        config.require("sliding_window_pattern", ("LLLG",), "LLLG")
        pattern = None
    number = _PATTERN if pattern is None else config.integer("sliding_window_pattern")
    return common.SLIDING if (index + 1) % number else common.FULL
