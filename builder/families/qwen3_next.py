"""Qwen3-Next and Qwen3.5: gated delta nets, and gated attention on every fourth layer.

Qwen3.5's config.json describes a model that also sees images; the text model alone is built.
"""

import dataclasses
from collections.abc import Callable

from trtc.builder.families import common
from trtc.builder.families.config import Config, shown
from trtc.builder.families.rope import rope_spec
from trtc.builder.spec import (
    AttentionSpec,
    DecoderSpec,
    GatedDeltaSpec,
    GroupedRows,
    LayerSpec,
    LinearSpec,
    NormSpec,
)
from trtc.protos.errors import CheckpointError, UnsupportedError

_DEFAULTS = {
    "num_attention_heads": 16,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_INTERVAL = 4
_LINEAR = "linear_attention"
_NORMS = common.NormStyle(unit_offset=True)
_OTHER_PARTS = (r"(model\.)?visual\..*", r"mtp\..*")
"""Tensors of the part that sees images, and of the one that drafts several tokens."""


def qwen3_5(config: Config, max_seq_len: int) -> DecoderSpec:
    """Qwen3_5ForCausalLM, and the text model in Qwen3_5ForConditionalGeneration."""
    config = config.with_defaults(num_key_value_heads=4)
    return _decoder(config, "qwen3_5", max_seq_len, _separate)


_Projections = Callable[[Config, str], tuple[LinearSpec, LinearSpec, LinearSpec, LinearSpec]]
"""qkv, z, b and a of a layer, by its prefix."""


def _decoder(
    config: Config, family: str, max_seq_len: int, projections: _Projections
) -> DecoderSpec:
    config = config.with_defaults(**_DEFAULTS)
    config.require("hidden_act", tuple(common.SILU), "silu")
    dim = common.head_dim(config)
    rope = rope_spec(config, dim, max_seq_len)
    kinds = _layer_kinds(config)
    width = config.integer("intermediate_size")

    def norm(name: str) -> NormSpec:
        return common.norm(config, name, _NORMS)

    def attention(prefix: str) -> AttentionSpec:
        bias = config.flag("attention_bias", False)
        plain = common.attention(config, prefix, rope, dim=dim, qkv_bias=bias, o_bias=bias)
        of_head = (dim, 2 * dim)
        return dataclasses.replace(
            plain,
            q=dataclasses.replace(plain.q, grouped=GroupedRows(2 * dim, ((0, dim),))),
            gate=dataclasses.replace(plain.q, grouped=GroupedRows(2 * dim, (of_head,))),
            q_norm=norm(f"{prefix}.self_attn.q_norm"),
            k_norm=norm(f"{prefix}.self_attn.k_norm"),
        )

    def layer(index: int, prefix: str) -> LayerSpec:
        attends = kinds[index] == common.FULL
        delta = f"{prefix}.linear_attn"
        return LayerSpec(
            mixer=attention(prefix) if attends else _delta(config, delta, projections),
            mlp=common.gated_mlp(config, f"{prefix}.mlp", width, "silu"),
            attention_norm=norm(f"{prefix}.input_layernorm"),
            mlp_norm=norm(f"{prefix}.post_attention_layernorm"),
        )

    spec = common.decoder(config, family, layer, style=_NORMS)
    return dataclasses.replace(spec, ignored_tensors=(*spec.ignored_tensors, *_OTHER_PARTS))


def _delta(config: Config, prefix: str, projections: _Projections) -> GatedDeltaSpec:
    heads = config.integer("linear_num_value_heads")
    dim = config.integer("linear_value_head_dim")
    qkv, z, b, a = projections(config, prefix)
    return GatedDeltaSpec(
        qkv=qkv,
        z=z,
        b=b,
        a=a,
        out_proj=LinearSpec(f"{prefix}.out_proj", heads * dim, config.integer("hidden_size")),
        conv=f"{prefix}.conv1d",
        taps=config.integer("linear_conv_kernel_dim", least=2),
        a_log=f"{prefix}.A_log",
        dt_bias=f"{prefix}.dt_bias",
        norm=common.norm(config, f"{prefix}.norm"),
        num_key_heads=config.integer("linear_num_key_heads"),
        num_value_heads=heads,
        key_dim=config.integer("linear_key_head_dim"),
        value_dim=dim,
    )


def _separate(config: Config, prefix: str) -> tuple[LinearSpec, LinearSpec, LinearSpec, LinearSpec]:
    """Four tensors, as in Qwen3.5."""
    hidden, heads = config.integer("hidden_size"), config.integer("linear_num_value_heads")
    keys, values = _widths(config)
    return (
        LinearSpec(f"{prefix}.in_proj_qkv", hidden, 2 * keys + values),
        LinearSpec(f"{prefix}.in_proj_z", hidden, values),
        LinearSpec(f"{prefix}.in_proj_b", hidden, heads),
        LinearSpec(f"{prefix}.in_proj_a", hidden, heads),
    )


def _widths(config: Config) -> tuple[int, int]:
    """Of all keys and of all values of a token.

    Raises:
        CheckpointError: heads of values do not share heads of keys equally.
    """
    key_heads = config.integer("linear_num_key_heads")
    heads = config.integer("linear_num_value_heads")
    if heads % key_heads:
        raise CheckpointError(
            f"{key_heads} does not divide linear_num_value_heads {heads}",
            field="config.json: linear_num_key_heads",
        )
    keys = key_heads * config.integer("linear_key_head_dim")
    return keys, heads * config.integer("linear_value_head_dim")


def _layer_kinds(config: Config) -> tuple[str, ...]:
    """Of each layer: `layer_types`, or attention on every `full_attention_interval`th.

    Raises:
        CheckpointError: they do not fit.
        UnsupportedError: a layer type that trtc does not have.
    """
    number = config.integer("num_hidden_layers")
    kinds = config.sequence("layer_types")
    if kinds is None:
        interval = config.integer("full_attention_interval", _INTERVAL)
        return tuple(_LINEAR if (index + 1) % interval else common.FULL for index in range(number))
    if len(kinds) < number:
        raise CheckpointError(
            f"names {len(kinds)} layers of {number}", field="config.json: layer_types"
        )
    for kind in kinds:
        if kind not in (_LINEAR, common.FULL):
            raise UnsupportedError(
                f"layer type {shown(kind)} is not supported",
                field="config.json: layer_types",
                remedy=f"trtc builds this family with {_LINEAR} and {common.FULL}",
            )
    return kinds
