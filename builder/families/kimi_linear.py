"""Kimi-Linear: delta nets that decay by channel (KDA), and latent attention among them."""

from collections.abc import Mapping

from trtc.builder.families import common, mixture
from trtc.builder.families.config import Config, shown
from trtc.builder.families.deepseek import biased_router
from trtc.builder.families.latent import latent_attention
from trtc.builder.spec import (
    DecoderSpec,
    DenseMlpSpec,
    GatedDeltaSpec,
    LatentAttentionSpec,
    LayerSpec,
    LinearSpec,
    MoeMlpSpec,
    RopeSpec,
)
from trtc.protos.errors import CheckpointError, UnsupportedError

_DEFAULTS = {
    "first_k_dense_replace": 1,
    "linear_conv_kernel_dim": 4,
    "linear_head_dim": 128,
    "linear_num_heads": 32,
    "moe_intermediate_size": 1024,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "rms_norm_eps": 1e-5,
    "routed_scaling_factor": 2.446,
}
_NAMES = {
    "max_position_embeddings": "model_max_length",
    "n_group": "num_expert_group",
    "n_routed_experts": "num_experts",
    "n_shared_experts": "num_shared_experts",
    "norm_topk_prob": "moe_renormalize",
    "num_experts_per_tok": "num_experts_per_token",
}
"""Fields of other families -> what Kimi-Linear calls them."""
_LINEAR_NAMES = {
    "linear_head_dim": "head_dim",
    "linear_num_heads": "num_heads",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
}
"""The same of fields in `linear_attn_config`."""
_DENSE, _SPARSE = "dense", "sparse"
_INTERVAL = 4


def kimi_linear(config: Config, max_seq_len: int) -> DecoderSpec:
    """KimiLinearForCausalLM."""
    linear = _linear_config(config)
    linear.require("gate_lower_bound", (None,), None)
    linear.require("use_full_rank_gate", (False,), False)
    config = _by_common_names(config, linear)
    config.require("hidden_act", tuple(common.SILU), "silu")
    config.require("mla_use_nope", (True,), True)
    config.require("moe_layer_freq", (1,), 1)
    config.require("moe_router_activation_func", ("sigmoid",), "sigmoid")
    if not config.flag("use_grouped_topk", True):
        config.require("n_group", (1,), 1)
    mixers, mlps = _mixer_types(config, linear), _mlp_types(config)

    def layer(index: int, prefix: str) -> LayerSpec:
        mixer = _attention if mixers[index] == common.FULL else _delta
        mlp = _dense if mlps[index] == _DENSE else _experts
        return common.layer_spec(config, prefix, mixer(config, prefix), mlp(config, prefix))

    return common.decoder(config, "kimi_linear", layer)


def _linear_config(config: Config) -> Config:
    """`linear_attn_config`, which published checkpoints have.

    Raises:
        CheckpointError: it is no object.
    """
    given = config.get("linear_attn_config")
    if given is None:
        return Config({})
    if not isinstance(given, Mapping):
        raise CheckpointError(
            f"is {shown(given)}, not an object", field="config.json: linear_attn_config"
        )
    return Config(given)


def _by_common_names(config: Config, linear: Config) -> Config:
    fields = dict(config.fields)
    for name, own in _NAMES.items():
        if fields.get(own) is not None:
            fields[name] = fields[own]
    for name, own in _LINEAR_NAMES.items():
        if linear.get(own) is not None:
            fields[name] = linear.get(own)
    return Config(fields).with_defaults(**_DEFAULTS)


def _attention(config: Config, prefix: str) -> LatentAttentionSpec:
    """Queries and keys are as they are, those dimensions that rope would turn included."""
    dim = config.integer("qk_rope_head_dim")
    if dim % 2:
        raise UnsupportedError(f"is {dim}, an odd number", field="config.json: qk_rope_head_dim")
    plain = {"rope_scaling": None, "rope_parameters": None, "rope_interleave": False}
    still = RopeSpec(rotary_dim=dim, inv_freq=(0.0,) * (dim // 2))
    return latent_attention(Config({**config.fields, **plain}), prefix, still)


def _delta(config: Config, prefix: str) -> GatedDeltaSpec:
    hidden, heads = config.integer("hidden_size"), config.integer("linear_num_heads")
    dim, name = config.integer("linear_head_dim"), f"{prefix}.self_attn"
    width = heads * dim

    def linear(own: str, inputs: int, outputs: int) -> LinearSpec:
        return LinearSpec(f"{name}.{own}_proj", inputs, outputs)

    return GatedDeltaSpec(
        qkv=(linear("q", hidden, width), linear("k", hidden, width), linear("v", hidden, width)),
        z=linear("g_b", dim, width),
        b=linear("b", hidden, heads),
        a=linear("f_b", dim, width),
        out_proj=linear("o", width, hidden),
        conv=(f"{name}.q_conv1d", f"{name}.k_conv1d", f"{name}.v_conv1d"),
        taps=config.integer("linear_conv_kernel_dim", least=2),
        a_log=f"{name}.A_log",
        dt_bias=f"{name}.dt_bias",
        norm=common.norm(config, f"{name}.o_norm"),
        num_key_heads=heads,
        num_value_heads=heads,
        key_dim=dim,
        value_dim=dim,
        decays=dim,
        gate="sigmoid",
        z_down=linear("g_a", hidden, dim),
        a_down=linear("f_a", hidden, dim),
        a_log_shape=(1, 1, heads, 1),
    )


def _dense(config: Config, prefix: str) -> DenseMlpSpec:
    return common.gated_mlp(config, f"{prefix}.mlp", config.integer("intermediate_size"), "silu")


def _experts(config: Config, prefix: str) -> MoeMlpSpec:
    name = f"{prefix}.block_sparse_moe"
    router = biased_router(config, f"{name}.gate")
    return mixture.routed_and_shared(config, name, router, mixture.NUMBERED)


def _mixer_types(config: Config, linear: Config) -> tuple[str, ...]:
    """Of each layer: `layer_types`, or what `linear_attn_config` lists, or every fourth attends.

    Raises:
        CheckpointError: they do not fit.
        UnsupportedError: a layer type that trtc does not have.
    """
    kinds = common.types_of_layers(config, "layer_types", (common.LINEAR, common.FULL))
    if kinds is not None:
        return kinds
    layers = range(config.integer("num_hidden_layers"))
    delta, full = linear.sequence("kda_layers"), linear.sequence("full_attn_layers")
    if delta is None or full is None:
        attends = {index for index in layers if index and index % _INTERVAL == 0}
    else:
        field = "config.json: linear_attn_config"
        if not all(type(one) is int for one in (*delta, *full)):
            raise CheckpointError("lists what is not the number of a layer", field=field)
        if sorted((*delta, *full)) != [index + 1 for index in layers]:
            raise CheckpointError(f"does not list each of {len(layers)} layers once", field=field)
        attends = {one - 1 for one in full}
    return tuple(common.FULL if index in attends else common.LINEAR for index in layers)


def _mlp_types(config: Config) -> tuple[str, ...]:
    """Of each layer: `mlp_layer_types`, or the first `first_k_dense_replace` are dense."""
    kinds = common.types_of_layers(config, "mlp_layer_types", (_DENSE, _SPARSE))
    if kinds is not None:
        return kinds
    dense = config.integer("first_k_dense_replace", least=0)
    layers = config.integer("num_hidden_layers")
    return tuple(_DENSE if index < dense else _SPARSE for index in range(layers))
