"""LFM2 and LFM2-MoE: gated short convolutions, and attention with q and k norms on some layers."""

import dataclasses
from collections.abc import Callable

from trtc.builder.families import common, mixture
from trtc.builder.families.bounds import INTEGERS
from trtc.builder.families.config import Config
from trtc.builder.families.rope import rope_spec
from trtc.builder.spec import (
    AttentionSpec,
    ChoiceBias,
    DecoderSpec,
    DenseMlpSpec,
    LayerSpec,
    LinearSpec,
    MoeMlpSpec,
    ShortConvSpec,
)
from trtc.protos.errors import CheckpointError

_THETA = 1e6
_TAPS = 3
_ATTENTION, _CONVOLUTION = "full_attention", "conv"
_ALIASES = {
    "norm_eps": "rms_norm_eps",
    "block_ff_dim": "intermediate_size",
    "tie_embedding": "tie_word_embeddings",
}
"""LFM2's name, which wins -> the usual one."""


def lfm2(config: Config, max_seq_len: int) -> DecoderSpec:
    """Lfm2ForCausalLM."""
    config = _with_usual_names(config)
    intermediate = _intermediate(config)

    def mlp(_index: int, prefix: str) -> DenseMlpSpec:
        return common.gated_mlp(config, prefix, intermediate, "silu", names=mixture.NUMBERED)

    return _lfm2(config, max_seq_len, "lfm2", mlp)


def lfm2_moe(config: Config, max_seq_len: int) -> DecoderSpec:
    """Lfm2MoeForCausalLM: routed experts after the first layers."""
    config = _with_usual_names(config).with_defaults(
        moe_intermediate_size=1792, num_experts_per_tok=4
    )
    number = mixture.num_experts(config, 32)
    dense = config.integer("num_dense_layers", 2, least=0)
    biased = config.flag("use_expert_bias", True)

    def mlp(index: int, prefix: str) -> DenseMlpSpec | MoeMlpSpec:
        if index < dense:
            width = config.integer("intermediate_size")
            return common.gated_mlp(config, prefix, width, "silu", names=mixture.NUMBERED)
        bias = ChoiceBias(f"{prefix}.expert_bias") if biased else None
        return MoeMlpSpec(
            mixture.sigmoid_router(config, f"{prefix}.gate", number, bias, epsilon=1e-6),
            mixture.gated_experts(
                config, prefix, number, config.integer("moe_intermediate_size"), mixture.NUMBERED
            ),
        )

    return _lfm2(config, max_seq_len, "lfm2_moe", mlp)


def _with_usual_names(config: Config) -> Config:
    given = {key: value for key, value in config.fields.items() if value is not None}
    renamed = {usual: given[name] for name, usual in _ALIASES.items() if name in given}
    return Config({"rms_norm_eps": 1e-5, **config.fields, **renamed})


def _lfm2(
    config: Config,
    max_seq_len: int,
    family: str,
    mlp: Callable[[int, str], DenseMlpSpec | MoeMlpSpec],
) -> DecoderSpec:
    """The layers around `mlp(layer, prefix)`."""
    dim = common.head_dim(config)
    rope = rope_spec(config, dim, max_seq_len, default_theta=_THETA)
    kinds = _layer_kinds(config)

    def attention(prefix: str) -> AttentionSpec:
        plain = common.attention(config, prefix, rope, dim=dim)
        return dataclasses.replace(
            plain,
            o=dataclasses.replace(plain.o, name=f"{prefix}.self_attn.out_proj"),
            q_norm=common.norm(config, f"{prefix}.self_attn.q_layernorm"),
            k_norm=common.norm(config, f"{prefix}.self_attn.k_layernorm"),
        )

    def layer(index: int, prefix: str) -> LayerSpec:
        attends = kinds[index] == _ATTENTION
        return LayerSpec(
            mixer=attention(prefix) if attends else _convolution(config, f"{prefix}.conv"),
            mlp=mlp(index, f"{prefix}.feed_forward"),
            attention_norm=common.norm(config, f"{prefix}.operator_norm"),
            mlp_norm=common.norm(config, f"{prefix}.ffn_norm"),
        )

    spec = common.decoder(config, family, layer, tied_by_default=True)
    return dataclasses.replace(spec, final_norm=common.norm(config, "model.embedding_norm"))


def _convolution(config: Config, prefix: str) -> ShortConvSpec:
    hidden, bias = config.integer("hidden_size"), config.flag("conv_bias", False)
    return ShortConvSpec(
        in_proj=LinearSpec(f"{prefix}.in_proj", hidden, 3 * hidden, bias),
        out_proj=LinearSpec(f"{prefix}.out_proj", hidden, hidden, bias),
        conv=f"{prefix}.conv",
        channels=hidden,
        taps=config.integer("conv_L_cache", _TAPS, least=2),
        has_bias=bias,
    )


def _intermediate(config: Config) -> int:
    """I: two thirds of the given size by a factor, rounded up to a multiple, unless the config
    turns that off.

    Raises:
        CheckpointError: that is more than any model has.
    """
    size = config.integer("intermediate_size")
    if not config.flag("block_auto_adjust_ff_dim", True):
        return size
    multiple = config.integer("block_multiple_of", 256)
    size = int(config.number("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
    size = -(-size // multiple) * multiple
    if not 1 <= size <= INTEGERS["intermediate_size"]:
        raise CheckpointError(
            f"gives an intermediate size of {size}", field="config.json: intermediate_size"
        )
    return size


def _layer_kinds(config: Config) -> tuple[str, ...]:
    """Of each layer: `layer_types`, or attention where `full_attn_idxs` says so, or everywhere.

    Raises:
        CheckpointError: they do not fit.
        UnsupportedError: a layer type that trtc does not have.
    """
    number = config.integer("num_hidden_layers")
    kinds = common.types_of_layers(config, "layer_types", (_ATTENTION, _CONVOLUTION))
    if kinds is None:
        attending = config.sequence("full_attn_idxs")
        attends = range(number) if attending is None else attending
        return tuple(_ATTENTION if index in attends else _CONVOLUTION for index in range(number))
    return kinds
