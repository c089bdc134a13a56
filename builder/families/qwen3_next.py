"""Qwen3-Next and Qwen3.5: gated delta nets, and gated attention on every fourth layer.

Qwen3.5's config.json describes a model that also sees images; the text model alone is built.
"""

import dataclasses
from collections.abc import Callable

from trtc.builder.families import common, delta, mixture
from trtc.builder.families.config import Config
from trtc.builder.families.rope import rope_spec
from trtc.builder.spec import (
    AttentionSpec,
    DecoderSpec,
    DenseMlpSpec,
    GatedDeltaSpec,
    GroupedRows,
    LayerSpec,
    LinearSpec,
    MoeMlpSpec,
    NormSpec,
)

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
_EXPERTS = {
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
"""Of the models with routed experts."""
_INTERVAL = 4
_NORMS = common.NormStyle(unit_offset=True)
_OTHER_PARTS = (r"(model\.)?visual\..*", r"mtp\..*")
"""Tensors of the part that sees images, and of the one that drafts several tokens."""


def qwen3_5(config: Config, max_seq_len: int) -> DecoderSpec:
    """Qwen3_5ForCausalLM, and the text model in Qwen3_5ForConditionalGeneration."""
    config = config.with_defaults(num_key_value_heads=4)
    return _decoder(config, "qwen3_5", max_seq_len, _separate, _dense)


def qwen3_5_moe(config: Config, max_seq_len: int) -> DecoderSpec:
    """Qwen3_5MoeForCausalLM, and the text model in Qwen3_5MoeForConditionalGeneration."""
    config = config.with_defaults(num_experts=256, num_experts_per_tok=8, **_EXPERTS)

    def mlp(config: Config, index: int, prefix: str) -> DenseMlpSpec | MoeMlpSpec:
        return _experts(config, prefix, renormalize=True)

    return _decoder(config, "qwen3_5_moe", max_seq_len, _separate, mlp)


def qwen3_next(config: Config, max_seq_len: int) -> DecoderSpec:
    """Qwen3NextForCausalLM."""
    config = config.with_defaults(
        num_experts=512, num_experts_per_tok=10, norm_topk_prob=True, **_EXPERTS
    )

    def mlp(config: Config, index: int, prefix: str) -> DenseMlpSpec | MoeMlpSpec:
        if not mixture.is_sparse_layer(config, index):
            return _dense(config, index, prefix)
        return _experts(config, prefix)

    return _decoder(config, "qwen3_next", max_seq_len, _by_key_head, mlp)


_Projections = Callable[[Config, str], tuple[LinearSpec, LinearSpec, LinearSpec, LinearSpec]]
"""qkv, z, b and a of a layer, by its prefix."""
_Mlp = Callable[[Config, int, str], DenseMlpSpec | MoeMlpSpec]
"""Of a layer, by its index and its prefix."""


def _decoder(
    config: Config, family: str, max_seq_len: int, projections: _Projections, mlp: _Mlp
) -> DecoderSpec:
    config = config.with_defaults(**_DEFAULTS)
    config.require("hidden_act", tuple(common.SILU), "silu")
    dim = common.head_dim(config)
    rope = rope_spec(config, dim, max_seq_len)
    kinds = _layer_kinds(config)

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
        net = f"{prefix}.linear_attn"
        return LayerSpec(
            mixer=attention(prefix) if attends else _delta(config, net, projections),
            mlp=mlp(config, index, f"{prefix}.mlp"),
            attention_norm=norm(f"{prefix}.input_layernorm"),
            mlp_norm=norm(f"{prefix}.post_attention_layernorm"),
        )

    spec = common.decoder(config, family, layer, style=_NORMS)
    return dataclasses.replace(spec, ignored_tensors=(*spec.ignored_tensors, *_OTHER_PARTS))


def _dense(config: Config, index: int, prefix: str) -> DenseMlpSpec:
    return common.gated_mlp(config, prefix, config.integer("intermediate_size"), "silu")


def _experts(config: Config, prefix: str, *, renormalize: bool | None = None) -> MoeMlpSpec:
    """Routed ones, and a shared one with a gate."""
    return mixture.with_shared_expert(
        mixture.softmax_experts(
            config, prefix, config.integer("moe_intermediate_size"), renormalize=renormalize
        ),
        common.gated_mlp(
            config,
            f"{prefix}.shared_expert",
            config.integer("shared_expert_intermediate_size"),
            "silu",
        ),
        gate=f"{prefix}.shared_expert_gate",
    )


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
    keys, values = delta.widths(config)
    return (
        LinearSpec(f"{prefix}.in_proj_qkv", hidden, 2 * keys + values),
        LinearSpec(f"{prefix}.in_proj_z", hidden, values),
        LinearSpec(f"{prefix}.in_proj_b", hidden, heads),
        LinearSpec(f"{prefix}.in_proj_a", hidden, heads),
    )


def _by_key_head(
    config: Config, prefix: str
) -> tuple[LinearSpec, LinearSpec, LinearSpec, LinearSpec]:
    """Two tensors, as in Qwen3-Next, in which what belongs to a key head lies side by side."""
    hidden, heads = config.integer("hidden_size"), config.integer("linear_num_value_heads")
    keys, values = delta.widths(config)
    key_heads = config.integer("linear_num_key_heads")
    dim, of_head, shared = keys // key_heads, values // key_heads, heads // key_heads
    end = 2 * dim + 2 * of_head
    qkv = GroupedRows(end, ((0, dim), (dim, 2 * dim), (2 * dim, 2 * dim + of_head)))
    z = GroupedRows(end, ((2 * dim + of_head, end),))
    b, a = (GroupedRows(2 * shared, ((begin, begin + shared),)) for begin in (0, shared))
    fused, gates = f"{prefix}.in_proj_qkvz", f"{prefix}.in_proj_ba"
    return (
        LinearSpec(fused, hidden, 2 * keys + values, grouped=qkv),
        LinearSpec(fused, hidden, values, grouped=z),
        LinearSpec(gates, hidden, heads, grouped=b),
        LinearSpec(gates, hidden, heads, grouped=a),
    )


def _layer_kinds(config: Config) -> tuple[str, ...]:
    """Of each layer: `layer_types`, or attention on every `full_attention_interval`th.

    Raises:
        CheckpointError: they do not fit.
        UnsupportedError: a layer type that trtc does not have.
    """
    number = config.integer("num_hidden_layers")
    kinds = common.types_of_layers(config, "layer_types", (common.LINEAR, common.FULL))
    if kinds is None:
        interval = config.integer("full_attention_interval", _INTERVAL)
        return tuple(
            common.LINEAR if (index + 1) % interval else common.FULL for index in range(number)
        )
    return kinds
