"""Nemotron-H and Nemotron-3: layers of one part each, Mamba-2, attention, an MLP or experts."""

import dataclasses
from collections.abc import Mapping

from trtc.builder.families import common, mamba, mixture
from trtc.builder.families.bounds import INTEGERS, MAX_EXPERTS_OF_ALL_LAYERS
from trtc.builder.families.config import Config, shown
from trtc.builder.spec import (
    NO_ROPE,
    Activation,
    ChoiceBias,
    DecoderSpec,
    DenseMlpSpec,
    LayerSpec,
    LinearSpec,
    MoeMlpSpec,
)
from trtc.protos.errors import CheckpointError, UnsupportedError

_MLP, _EXPERTS = "mlp", "moe"
_KINDS = (mamba.MAMBA, common.FULL, _MLP, _EXPERTS)
_LETTERS: Mapping[str, str] = {"M": mamba.MAMBA, "*": common.FULL, "-": _MLP, "E": _EXPERTS}
"""Of `hybrid_override_pattern`."""
_DEFAULT_KINDS = (mamba.MAMBA, _EXPERTS, common.FULL, _MLP)
_DEFAULTS = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 21504,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
    "layer_norm_epsilon": 1e-5,
}
_NORMS = common.NormStyle(eps="layer_norm_epsilon")
_ACTIVATIONS: Mapping[str, Activation] = {**common.RELU2, **common.ACTIVATIONS}
_DRAFTS = r"mtp\..*"
"""Tensors of the part that drafts several tokens."""


def nemotron_h(config: Config, max_seq_len: int) -> DecoderSpec:
    """NemotronHForCausalLM.

    Steps of its Mamba-2 layers are limited by `time_step_limit`, as in NVIDIA's own code and in
    vLLM. Transformers has `time_step_min` as the lower limit in prompts, and none in decodes.
    """
    kinds = _layer_kinds(config)
    config = config.with_defaults(**_DEFAULTS)
    config = Config({**config.fields, "num_hidden_layers": len(kinds)})
    config.require("mamba_hidden_act", tuple(common.SILU), "silu")
    config.require("tie_word_embeddings", (False,), False)
    sizes, dim = _sizes(config), common.head_dim(config)

    def layer(index: int, prefix: str) -> LayerSpec:
        kind, name = kinds[index], f"{prefix}.mixer"
        norm = common.norm(config, f"{prefix}.norm", _NORMS)
        if kind == mamba.MAMBA:
            return LayerSpec(mamba.mamba2(config, name, sizes, _NORMS), None, norm)
        if kind == common.FULL:
            attention = common.attention(config, prefix, NO_ROPE, dim=dim, name="mixer")
            return LayerSpec(attention, None, norm)
        mlp = _experts(config, name) if kind == _EXPERTS else _mlp(config, name)
        return LayerSpec(None, mlp, mlp_norm=norm)

    spec = common.decoder(config, "nemotron_h", layer, style=_NORMS)
    return dataclasses.replace(
        spec,
        embedding="model.embeddings.weight",
        final_norm=common.norm(config, "model.norm_f", _NORMS),
        ignored_tensors=(*spec.ignored_tensors, _DRAFTS),
    )


def _mlp(config: Config, prefix: str) -> DenseMlpSpec:
    hidden, width = config.integer("hidden_size"), config.integer("intermediate_size")
    return _gateless(config, prefix, hidden, width, bias=config.flag("mlp_bias", False))


def _gateless(
    config: Config, prefix: str, hidden: int, width: int, *, bias: bool = False
) -> DenseMlpSpec:
    return DenseMlpSpec(
        gate=None,
        up=LinearSpec(f"{prefix}.up_proj", hidden, width, bias),
        down=LinearSpec(f"{prefix}.down_proj", width, hidden, bias),
        activation=_ACTIVATIONS[config.require("mlp_hidden_act", tuple(_ACTIVATIONS), "relu2")],
    )


def _experts(config: Config, prefix: str) -> MoeMlpSpec:
    """Routed ones, on `moe_latent_size` values of a row if that is given, and a shared one."""
    hidden, bias = config.integer("hidden_size"), config.flag("mlp_bias", False)
    number, width = config.integer("n_routed_experts"), config.integer("moe_intermediate_size")
    inner = config.optional_integer("moe_latent_size")
    choice_bias = ChoiceBias(f"{prefix}.gate.e_score_correction_bias")
    return MoeMlpSpec(
        router=mixture.sigmoid_router(config, f"{prefix}.gate", number, choice_bias, epsilon=1e-20),
        experts=tuple(
            _gateless(config, f"{prefix}.experts.{expert}", inner or hidden, width)
            for expert in range(number)
        ),
        shared=_gateless(
            config,
            f"{prefix}.shared_experts",
            hidden,
            config.integer("moe_shared_expert_intermediate_size"),
            bias=bias,
        ),
        latent=None
        if inner is None
        else (
            LinearSpec(f"{prefix}.fc1_latent_proj", hidden, inner, bias),
            LinearSpec(f"{prefix}.fc2_latent_proj", inner, hidden, bias),
        ),
    )


def _sizes(config: Config) -> mamba.Sizes:
    heads, groups = config.integer("mamba_num_heads"), config.integer("n_groups")
    mamba.check_groups(heads, groups, "n_groups")
    return mamba.Sizes(
        heads=heads,
        head_dim=config.integer("mamba_head_dim"),
        groups=groups,
        state_size=config.integer("ssm_state_size"),
        taps=config.integer("conv_kernel", least=2),
        conv_bias=config.flag("use_conv_bias", True),
        proj_bias=config.flag("use_bias", False),
    )


def _layer_kinds(config: Config) -> tuple[str, ...]:
    """Of each layer, by `layers_block_type`, or else by the letters of `hybrid_override_pattern`.

    Raises:
        CheckpointError: none, too many, or too many experts in all of them.
        UnsupportedError: a layer type that trtc does not have.
    """
    field = "layers_block_type"
    kinds = mamba.layer_kinds(config, field, _KINDS)
    if kinds is None:
        field = "hybrid_override_pattern"
        pattern = config.get(field)
        kinds = _DEFAULT_KINDS if pattern is None else _by_letters(pattern)
    if not 1 <= len(kinds) <= INTEGERS["num_hidden_layers"]:
        raise CheckpointError(
            f"names {len(kinds)} layers, and a model has 1 to {INTEGERS['num_hidden_layers']}",
            field=f"config.json: {field}",
        )
    experts = config.integer("n_routed_experts", _DEFAULTS["n_routed_experts"])  # type: ignore[arg-type]
    if kinds.count(_EXPERTS) * experts > MAX_EXPERTS_OF_ALL_LAYERS:
        raise CheckpointError(
            f"is {experts} in each of {kinds.count(_EXPERTS)} layers, more than "
            f"{MAX_EXPERTS_OF_ALL_LAYERS} together",
            field="config.json: n_routed_experts",
        )
    return kinds


def _by_letters(pattern: object) -> tuple[str, ...]:
    if not isinstance(pattern, str) or not set(pattern) <= set(_LETTERS):
        raise UnsupportedError(
            f"is {shown(pattern)}",
            field="config.json: hybrid_override_pattern",
            remedy=f"trtc builds this family with the letters {' '.join(_LETTERS)}",
        )
    return tuple(_LETTERS[letter] for letter in pattern)
