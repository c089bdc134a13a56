"""Phi-MoE (Phi-3.5-MoE, Phi-mini-MoE): Mixtral's experts behind a SparseMixer, LayerNorm, biases of
attention and of the lm_head."""

import dataclasses
from typing import Any

from trtc.builder.families import common, mixture
from trtc.builder.families.config import Config
from trtc.builder.families.rope import rope_parameters, rope_spec
from trtc.builder.spec import DecoderSpec, LayerSpec, LinearSpec, MoeMlpSpec, RopeSpec, RouterSpec
from trtc.protos.errors import UnsupportedError

_STYLE = common.NormStyle(centered=True, has_bias=True)


def phimoe(config: Config, max_seq_len: int) -> DecoderSpec:
    """PhimoeForCausalLM; published configs say PhiMoEForCausalLM."""
    config = config.with_defaults(rms_norm_eps=1e-5)
    config.require("num_experts_per_tok", (2,), 2)
    dim = common.head_dim(config)
    rope = _rope(config, dim, max_seq_len)
    bias = config.flag("attention_bias", False)
    window = config.optional_integer("sliding_window")

    def layer(index: int, prefix: str) -> LayerSpec:
        attention = common.attention(
            config, prefix, rope, dim=dim, qkv_bias=bias, o_bias=bias, window=window
        )
        mlp = _experts(config, f"{prefix}.block_sparse_moe")
        return common.layer_spec(config, prefix, attention, mlp, style=_STYLE)

    spec = common.decoder(config, "phimoe", layer, style=_STYLE)
    has_bias = config.flag("lm_head_bias", False)
    return dataclasses.replace(spec, lm_head=dataclasses.replace(spec.lm_head, has_bias=has_bias))


def _experts(config: Config, prefix: str) -> MoeMlpSpec:
    number = mixture.num_experts(config, 16)
    width = config.integer("intermediate_size")
    return MoeMlpSpec(
        RouterSpec(
            LinearSpec(f"{prefix}.gate", config.integer("hidden_size"), number),
            mixture.experts_per_token(config, number, 2),
            score="sparsemixer",
            margin=2 * config.number("router_jitter_noise", 0.01),
            renormalize=False,
        ),
        mixture.gated_experts(config, prefix, number, width, mixture.NUMBERED),
    )


def _rope(config: Config, dim: int, max_seq_len: int) -> RopeSpec:
    """Longrope, whose attention factor is a field of its own.

    Raises:
        UnsupportedError: the factors of short and long sequences differ.
    """
    given: dict[str, Any] = dict(rope_parameters(config))
    scale = Config(given).optional_number("short_mscale")
    if scale is None:
        return rope_spec(config, dim, max_seq_len, default_theta=1e6)
    if Config(given).number("long_mscale") != scale:
        raise UnsupportedError(
            f"{given['long_mscale']} differs from short_mscale {scale}, which is not supported",
            field="config.json: rope_parameters.long_mscale",
        )
    fields = {**config.fields, "rope_parameters": {**given, "attention_factor": scale}}
    return rope_spec(Config(fields), dim, max_seq_len, default_theta=1e6)
