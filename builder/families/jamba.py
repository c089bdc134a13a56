"""Jamba: Mamba layers, attention without a rotary embedding on some, experts on every other one."""

import math
from dataclasses import replace

from trtc.builder.families import common, mixture
from trtc.builder.families.config import Config
from trtc.builder.spec import (
    NO_ROPE,
    DecoderSpec,
    DenseMlpSpec,
    LayerSpec,
    LinearSpec,
    Mamba1Spec,
    MoeMlpSpec,
    RouterSpec,
)
from trtc.protos.errors import CheckpointError, UnsupportedError

_DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 262144,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "attn_layer_period": 8,
    "attn_layer_offset": 4,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
_RANK_PARTS = 16
"""Of the hidden size is the rank of steps, where `mamba_dt_rank` is "auto"."""
_STATE_MULTIPLE = 8
"""Of B and C, which lie side by side: GPUs read them in words of 16 bytes."""
_NORMS = common.NormNames(attention="input_layernorm", mlp="pre_ff_layernorm")


def jamba(config: Config, max_seq_len: int) -> DecoderSpec:
    """JambaForCausalLM."""
    if config.get("num_experts") is None:
        config = config.with_defaults(num_experts=config.get("num_local_experts"))
    config = config.with_defaults(**_DEFAULTS)
    config.require("hidden_act", tuple(common.SILU), "silu")
    dim, width = common.head_dim(config), config.integer("intermediate_size")
    experts = config.integer("num_experts")

    def layer(index: int, prefix: str) -> LayerSpec:
        mixer = (
            common.attention(config, prefix, NO_ROPE, dim=dim)
            if _is_every(config, "attn_layer", index)
            else _mamba(config, f"{prefix}.mamba")
        )
        name = f"{prefix}.feed_forward"
        mlp: DenseMlpSpec | MoeMlpSpec
        if experts > 1 and _is_every(config, "expert_layer", index):
            mlp = _experts(config, name, experts, width)
        else:
            mlp = common.gated_mlp(config, name, width, common.activation(config))
        return common.layer_spec(config, prefix, mixer, mlp, _NORMS)

    spec = common.decoder(config, "jamba", layer)
    return replace(spec, final_norm=common.norm(config, "model.final_layernorm"))


def _is_every(config: Config, what: str, index: int) -> bool:
    """Whether a layer is one of those that come every so many.

    Raises:
        CheckpointError: the offset is not below the period.
    """
    period = config.integer(f"{what}_period")
    offset = config.integer(f"{what}_offset", least=0)
    if offset >= period:
        raise CheckpointError(
            f"is {offset}, not below {what}_period {period}", field=f"config.json: {what}_offset"
        )
    return index % period == offset


def _experts(config: Config, prefix: str, number: int, width: int) -> MoeMlpSpec:
    router = RouterSpec(
        LinearSpec(f"{prefix}.router", config.integer("hidden_size"), number),
        mixture.experts_per_token(config, number),
        renormalize=False,
    )
    return MoeMlpSpec(router, mixture.gated_experts(config, prefix, number, width))


def _mamba(config: Config, prefix: str) -> Mamba1Spec:
    """in_proj has the rows of x and z, x_proj those of the steps' rank, B and C.

    Raises:
        UnsupportedError: a size of the state that kernels do not read in whole words.
    """
    hidden = config.integer("hidden_size")
    channels, states = config.integer("mamba_expand") * hidden, config.integer("mamba_d_state")
    if states % _STATE_MULTIPLE:
        raise UnsupportedError(
            f"is {states}, no multiple of {_STATE_MULTIPLE}", field="config.json: mamba_d_state"
        )
    bias, rank = config.flag("mamba_proj_bias", False), _rank(config, hidden)

    def rows(name: str, depth: int, begin: int, number: int, *, bias: bool = False) -> LinearSpec:
        return LinearSpec(f"{prefix}.{name}", depth, number, bias, rows=(begin, begin + number))

    return Mamba1Spec(
        x=rows("in_proj", hidden, 0, channels, bias=bias),
        z=rows("in_proj", hidden, channels, channels, bias=bias),
        time=rows("x_proj", channels, 0, rank),
        b=rows("x_proj", channels, rank, states),
        c=rows("x_proj", channels, rank + states, states),
        dt=LinearSpec(f"{prefix}.dt_proj", rank, channels),
        out_proj=LinearSpec(f"{prefix}.out_proj", channels, hidden, bias),
        conv=f"{prefix}.conv1d",
        taps=config.integer("mamba_d_conv", least=2),
        a_log=f"{prefix}.A_log",
        dt_bias=f"{prefix}.dt_proj.bias",
        skip=f"{prefix}.D",
        channels=channels,
        rank=rank,
        state_size=states,
        time_norm=common.norm(config, f"{prefix}.dt_layernorm"),
        b_norm=common.norm(config, f"{prefix}.b_layernorm"),
        c_norm=common.norm(config, f"{prefix}.c_layernorm"),
        has_bias=config.flag("mamba_conv_bias", True),
    )


def _rank(config: Config, hidden: int) -> int:
    if config.get("mamba_dt_rank") in (None, "auto"):
        return math.ceil(hidden / _RANK_PARTS)
    return config.integer("mamba_dt_rank")
