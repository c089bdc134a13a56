"""Llama 2 and 3.x, and what has Llama's graph: Yi, Helium, ERNIE 4.5, Seed-OSS, InternLM3."""

from trtc.builder.families.config import Config
from trtc.builder.families.dense import Dense, dense
from trtc.builder.spec import DecoderSpec


def llama(config: Config, max_seq_len: int) -> DecoderSpec:
    """LlamaForCausalLM."""
    bias = config.flag("attention_bias", False)
    mlp_bias = config.flag("mlp_bias", False)
    return dense(config, max_seq_len, Dense("llama", qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias))


def internlm3(config: Config, max_seq_len: int) -> DecoderSpec:
    """InternLM3ForCausalLM; Transformers 5 saves `qkv_bias` and `bias` as Llama's fields."""
    config = config.with_defaults(head_dim=128, rms_norm_eps=1e-5)
    qkv_bias = config.flag("attention_bias", config.flag("qkv_bias", False))
    bias = config.flag("mlp_bias", config.flag("bias", False))
    differs = Dense("internlm3", qkv_bias=qkv_bias, o_bias=bias, mlp_bias=bias)
    return dense(config, max_seq_len, differs)


def helium(config: Config, max_seq_len: int) -> DecoderSpec:
    """HeliumForCausalLM."""
    config = config.with_defaults(head_dim=128, rms_norm_eps=1e-8)
    return dense(
        config,
        max_seq_len,
        Dense(
            "helium",
            theta=100000.0,
            interleaved=True,
            qkv_bias=config.flag("attention_bias", False),
            mlp_bias=config.flag("mlp_bias", False),
        ),
    )


def ernie4_5(config: Config, max_seq_len: int) -> DecoderSpec:
    """Ernie4_5ForCausalLM."""
    config = config.with_defaults(head_dim=128, rms_norm_eps=1e-5)
    bias = config.flag("use_bias", False)
    return dense(
        config,
        max_seq_len,
        Dense(
            "ernie4_5",
            theta=500000.0,
            interleaved=True,
            qkv_bias=bias,
            o_bias=bias,
            mlp_bias=bias,
            tied=True,
        ),
    )


def seed_oss(config: Config, max_seq_len: int) -> DecoderSpec:
    """SeedOssForCausalLM."""
    config = config.with_defaults(head_dim=128)
    return dense(
        config,
        max_seq_len,
        Dense(
            "seed_oss",
            qkv_bias=config.flag("attention_bias", True),
            o_bias=config.flag("attention_out_bias", False),
            mlp_bias=config.flag("mlp_bias", False),
        ),
    )
