"""StarCoder2 and StableLM: LayerNorm with biases."""

from trtc.builder.families import common
from trtc.builder.families.config import Config
from trtc.builder.families.dense import Dense, dense
from trtc.builder.spec import DecoderSpec, DenseMlpSpec


def starcoder2(config: Config, max_seq_len: int) -> DecoderSpec:
    """Starcoder2ForCausalLM: an MLP without a gate."""
    bias = config.flag("use_bias", True)
    window = config.optional_integer("sliding_window")

    def mlp(prefix: str) -> DenseMlpSpec:
        return common.plain_mlp(
            config, prefix, "gelu_pytorch_tanh", bias=bias, names=("c_fc", "c_proj")
        )

    return dense(
        config,
        max_seq_len,
        Dense(
            "starcoder2",
            qkv_bias=bias,
            o_bias=bias,
            style=common.NormStyle("norm_epsilon", centered=True, has_bias=True),
            tied=True,
        ),
        window=lambda index: window,
        mlp=mlp,
    )


def stablelm(config: Config, max_seq_len: int) -> DecoderSpec:
    """StableLmForCausalLM: the rotary embedding turns a quarter of a head."""
    config.require("qk_layernorm", (False,), False)
    config = config.with_defaults(partial_rotary_factor=0.25)
    parallel = config.flag("use_parallel_residual", False)
    return dense(
        config,
        max_seq_len,
        Dense(
            "stablelm",
            qkv_bias=config.flag("use_qkv_bias", False),
            norms=common.PARALLEL_NORMS if parallel else common.PRE_NORMS,
            style=common.NormStyle("layer_norm_eps", centered=True, has_bias=True),
            parallel=parallel,
        ),
    )
