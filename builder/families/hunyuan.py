"""Hunyuan V1, dense and with experts: Llama with norms of q and k after rope, and one shared expert
as wide as a routed one."""

import dataclasses
from collections.abc import Callable

from trtc.builder.families import common, mixture
from trtc.builder.families.config import Config
from trtc.builder.families.rope import rope_parameters, rope_spec
from trtc.builder.spec import (
    DecoderSpec,
    DenseMlpSpec,
    LayerSpec,
    LinearSpec,
    MoeMlpSpec,
    NormSpec,
    RopeSpec,
    RouterSpec,
)
from trtc.protos.errors import CheckpointError

Mlp = Callable[[int, str], DenseMlpSpec | MoeMlpSpec]


def hunyuan_dense(config: Config, max_seq_len: int) -> DecoderSpec:
    """HunYuanDenseV1ForCausalLM."""
    width = config.integer("intermediate_size")
    act = common.activation(config)

    def mlp(index: int, prefix: str) -> DenseMlpSpec:
        return common.gated_mlp(config, prefix, width, act)

    return _hunyuan(config, "hunyuan_dense", mlp, max_seq_len)


def hunyuan_moe(config: Config, max_seq_len: int) -> DecoderSpec:
    """HunYuanMoEV1ForCausalLM (Hunyuan-A13B).

    Raises:
        UnsupportedError: layers without experts, or experts of other widths.
    """
    config.require("moe_layer_num_skipped", (0,), 0)
    width, number = config.integer("intermediate_size"), mixture.num_experts(config)
    act = common.activation(config)

    def mlp(index: int, prefix: str) -> MoeMlpSpec:
        _of_layer(config, "moe_intermediate_size", index).require(
            "moe_intermediate_size", (width,), width
        )
        _of_layer(config, "num_shared_expert", index).require("num_shared_expert", (1,), 1)
        router = LinearSpec(f"{prefix}.gate.wg", config.integer("hidden_size"), number)
        return mixture.with_shared_expert(
            MoeMlpSpec(
                RouterSpec(router, _experts_per_token(config, index, number)),
                mixture.gated_experts(config, prefix, number, width),
            ),
            common.gated_mlp(config, f"{prefix}.shared_mlp", width, act),
        )

    return _hunyuan(config, "hunyuan_moe", mlp, max_seq_len)


def _hunyuan(config: Config, family: str, mlp: Mlp, max_seq_len: int) -> DecoderSpec:
    """
    Raises:
        UnsupportedError: layers that share keys and values, or without norms of q and k.
    """
    config = config.with_defaults(rms_norm_eps=1e-5)
    config.require("use_cla", (False,), False)
    config.require("use_qk_norm", (True,), True)
    dim = common.head_dim(config)
    rope = _rope(config, dim, max_seq_len)
    bias = config.flag("attention_bias", False)

    def layer(index: int, prefix: str) -> LayerSpec:
        def norm(name: str) -> NormSpec:
            return common.norm(config, f"{prefix}.self_attn.{name}")

        attention = common.attention(config, prefix, rope, dim=dim, qkv_bias=bias, o_bias=bias)
        attention = dataclasses.replace(
            attention,
            q_norm=norm("query_layernorm"),
            k_norm=norm("key_layernorm"),
            norm_after_rope=True,
        )
        return common.layer_spec(config, prefix, attention, mlp(index, f"{prefix}.mlp"))

    return common.decoder(config, family, layer)


def _rope(config: Config, dim: int, max_seq_len: int) -> RopeSpec:
    """`alpha` makes the "dynamic" rotary embedding of these models a fixed one."""
    has_alpha = bool(rope_parameters(config).get("alpha"))
    renamed = {"dynamic": "ntk_alpha"} if has_alpha else {}
    return rope_spec(config, dim, max_seq_len, renamed=renamed)


def _experts_per_token(config: Config, index: int, number: int) -> int:
    """
    Raises:
        CheckpointError: more than there are.
    """
    field = "moe_topk"
    top_k = _of_layer(config, field, index).integer(field, 1)
    if top_k > number:
        raise CheckpointError(
            f"is {top_k}, and there are {number} experts", field=f"config.json: {field}"
        )
    return top_k


def _of_layer(config: Config, key: str, index: int) -> Config:
    """The config with what is a layer's own where `key` has a list of all layers.

    Raises:
        CheckpointError: the list is too short.
    """
    given = config.get(key)
    if not isinstance(given, list):
        return config
    if index >= len(given):
        raise CheckpointError(
            f"has {len(given)} values, and there is a layer {index}", field=f"config.json: {key}"
        )
    return Config({**config.fields, key: given[index]})
