"""Granite 3 and 4, dense: Llama with multipliers of embeddings, residuals, scores and logits."""

import dataclasses

from trtc.builder.families.config import Config
from trtc.builder.families.dense import Dense, dense
from trtc.builder.spec import AttentionSpec, DecoderSpec, LayerSpec, MixerSpec, NormSpec


def granite(config: Config, max_seq_len: int) -> DecoderSpec:
    """GraniteForCausalLM."""
    bias = config.flag("attention_bias", False)
    differs = Dense("granite", qkv_bias=bias, o_bias=bias, mlp_bias=config.flag("mlp_bias", False))
    return with_multipliers(config, dense(config, max_seq_len, differs))


def with_multipliers(config: Config, spec: DecoderSpec) -> DecoderSpec:
    """A decoder whose norms come before, with Granite's four multipliers.

    The residual stream e * x0 + r * x1 + r * x2 + ... is r times e / r * x0 + x1 + x2 + ..., and
    norms, which alone read it, do not see a factor: rms_norm(r * x, eps) is
    rms_norm(x, eps / r**2). So the residual multiplier r costs no operation.
    """
    residual = config.number("residual_multiplier", 1.0)
    scale = config.number("attention_multiplier", 1.0)

    def norm(spec: NormSpec | None) -> NormSpec | None:
        return spec and dataclasses.replace(spec, eps=spec.eps / residual**2)

    def mixer(spec: MixerSpec | None) -> MixerSpec | None:
        if isinstance(spec, AttentionSpec):
            return dataclasses.replace(spec, scale=scale)
        return spec

    def layer(spec: LayerSpec) -> LayerSpec:
        return dataclasses.replace(
            spec,
            mixer=mixer(spec.mixer),
            attention_norm=norm(spec.attention_norm),
            mlp_norm=norm(spec.mlp_norm),
        )

    return dataclasses.replace(
        spec,
        layers=tuple(layer(one) for one in spec.layers),
        embedding_scale=config.number("embedding_multiplier", 1.0) / residual,
        final_norm=dataclasses.replace(
            spec.final_norm,
            eps=spec.final_norm.eps / residual**2,
            multiplier=1.0 / config.number("logits_scaling", 1.0),
        ),
    )
