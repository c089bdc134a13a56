"""Parts of mixtures of experts that several families share."""

import dataclasses

from trtc.builder.families import common
from trtc.builder.families.config import Config, shown
from trtc.builder.spec import (
    ChoiceBias,
    DenseMlpSpec,
    GroupScore,
    LinearSpec,
    MoeMlpSpec,
    RouterScore,
    RouterSpec,
)
from trtc.protos.errors import CheckpointError

Names = tuple[str, str, str]
"""Of an expert's gate, up and down."""
PROJ: Names = ("gate_proj", "up_proj", "down_proj")
NUMBERED: Names = ("w1", "w3", "w2")
"""As in Mixtral."""


def num_experts(config: Config, default: int | None = None) -> int:
    """E; Transformers 5 saves the older `num_experts` as `num_local_experts`."""
    return config.optional_integer("num_local_experts") or config.integer("num_experts", default)


def experts_per_token(config: Config, number: int, default: int | None = None) -> int:
    """k, which is at most the number of experts.

    Raises:
        CheckpointError: it is more.
    """
    top_k = config.integer("num_experts_per_tok", default)
    if top_k > number:
        raise CheckpointError(
            f"is {top_k}, and there are {number} experts",
            field="config.json: num_experts_per_tok",
        )
    return top_k


def gated_experts(
    config: Config, prefix: str, number: int, width: int, names: Names = PROJ
) -> tuple[DenseMlpSpec, ...]:
    """Gated MLPs of `width` under `<prefix>.experts`, each with tensors of its own."""
    act = common.activation(config)
    return tuple(
        common.gated_mlp(config, f"{prefix}.experts.{expert}", width, act, names=names)
        for expert in range(number)
    )


def softmax_experts(
    config: Config,
    prefix: str,
    width: int,
    *,
    experts: int | None = None,
    top_k: int | None = None,
    renormalize: bool | None = None,
    names: Names = PROJ,
) -> MoeMlpSpec:
    """Experts of `width` under `prefix`, of which the likeliest are chosen.

    Args:
        experts, top_k: what the family assumes where the config does not say; None: it has to.
        renormalize: None: `norm_topk_prob` says whether.
    """
    number = num_experts(config, experts)
    return MoeMlpSpec(
        router=RouterSpec(
            LinearSpec(f"{prefix}.gate", config.integer("hidden_size"), number),
            experts_per_token(config, number, top_k),
            renormalize=config.flag("norm_topk_prob", False)
            if renormalize is None
            else renormalize,
        ),
        experts=gated_experts(config, prefix, number, width, names),
    )


def sigmoid_router(
    config: Config,
    name: str,
    number: int,
    choice_bias: ChoiceBias | None,
    *,
    renormalize: bool = True,
    epsilon: float = 0.0,
) -> RouterSpec:
    """A router whose experts are chosen by their sigmoid and a bias, in groups if there are some
    (DeepSeek-V3, GLM-4.5, LFM2-MoE).

    Args:
        name: of its linear in the checkpoint.
        renormalize: where `norm_topk_prob` says nothing.

    Raises:
        CheckpointError: the groups do not fit the experts.
    """
    router = grouped_router(config, name, number, "sigmoid")
    return dataclasses.replace(
        router,
        choice_bias=choice_bias,
        renormalize=config.flag("norm_topk_prob", renormalize),
        epsilon=epsilon,
    )


def grouped_router(
    config: Config,
    name: str,
    number: int,
    score: RouterScore,
    group_score: GroupScore = "top2_sum",
) -> RouterSpec:
    """A router by DeepSeek's fields: `topk_group` of `n_group` groups, and what scales the weights.

    Args:
        name: of its linear in the checkpoint.

    Raises:
        CheckpointError: the groups do not fit the experts.
    """
    groups, top_groups = config.integer("n_group", 1), config.integer("topk_group", 1)
    top_k = experts_per_token(config, number)
    _check_groups(number, groups, top_groups, top_k)
    return RouterSpec(
        LinearSpec(name, config.integer("hidden_size"), number),
        top_k,
        score=score,
        num_groups=groups,
        top_groups=top_groups,
        group_score=group_score,
        scale=config.number("routed_scaling_factor", 1.0),
    )


def _check_groups(number: int, groups: int, top_groups: int, top_k: int) -> None:
    if number % groups or (groups > 1 and number == groups):
        raise CheckpointError(
            f"is {groups}, which makes no equal groups of two or more of {number} experts",
            field="config.json: n_group",
        )
    if top_groups > groups:
        raise CheckpointError(
            f"is {top_groups}, and there are {groups} groups", field="config.json: topk_group"
        )
    if top_k > number // groups * top_groups:
        raise CheckpointError(
            f"is {top_k}, and {top_groups} groups have {number // groups * top_groups} experts",
            field="config.json: num_experts_per_tok",
        )


def with_shared_expert(
    mlp: MoeMlpSpec, shared: DenseMlpSpec, *, gate: str | None = None
) -> MoeMlpSpec:
    """Beside the routed ones, times the sigmoid of what the linear `gate` gives."""
    hidden = mlp.router.linear.in_features
    linear = None if gate is None else LinearSpec(gate, hidden, 1)
    return dataclasses.replace(mlp, shared=shared, shared_gate=linear)


def routed_and_shared(
    config: Config, prefix: str, router: RouterSpec, names: Names = PROJ
) -> MoeMlpSpec:
    """`n_shared_experts` beside the routed ones, all of `moe_intermediate_size`, by DeepSeek's
    names, but for those in routed ones, `names`."""
    number, width = router.linear.out_features, config.integer("moe_intermediate_size")
    shared = common.gated_mlp(
        config,
        f"{prefix}.shared_experts",
        width * config.integer("n_shared_experts", 1),
        common.activation(config),
    )
    return with_shared_expert(
        MoeMlpSpec(router, gated_experts(config, prefix, number, width, names)), shared
    )


def is_sparse_layer(config: Config, index: int) -> bool:
    """Qwen's rule: every `decoder_sparse_step`-th layer has experts, but for `mlp_only_layers`.

    Raises:
        CheckpointError: `mlp_only_layers` lists what is no layer.
    """
    dense = config.sequence("mlp_only_layers") or ()
    for layer in dense:
        if not isinstance(layer, int) or isinstance(layer, bool):
            raise CheckpointError(
                f"has {shown(layer)}, not the number of a layer",
                field="config.json: mlp_only_layers",
            )
    return (index + 1) % config.integer("decoder_sparse_step", 1) == 0 and index not in dense
