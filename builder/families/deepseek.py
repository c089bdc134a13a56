"""DeepSeek-V2, V3, R1 and V3.2, and Kimi-K2: latent attention, and routed experts beside shared
ones."""

import dataclasses
from collections.abc import Callable

from trtc.builder.families import common, mixture
from trtc.builder.families.config import Config
from trtc.builder.families.indexer import indexer
from trtc.builder.families.latent import latent_attention, latent_rope
from trtc.builder.spec import (
    ChoiceBias,
    DecoderSpec,
    LatentAttentionSpec,
    LayerSpec,
    QueryScale,
    RouterSpec,
)

Router = Callable[[Config, str], RouterSpec]
"""(config, name of its linear in the checkpoint) -> the router of a layer."""
Selecting = Callable[[int, str, LatentAttentionSpec], LatentAttentionSpec]
"""(layer, its prefix, its attention) -> the same, of selected tokens."""
_DENSE, _SPARSE = "dense", "sparse"
"""MLPs without experts, and with them."""
_V2_DEFAULTS = {
    "first_k_dense_replace": 0,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1407,
}
_V3_DEFAULTS = {
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
}
_V32_DEFAULTS = {**_V3_DEFAULTS, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048}
_OTHER_PARTS = (
    r"(model\.)?vision_tower\..*",
    r"(model\.)?mm_projector\..*",
    r"(model\.)?multi_modal_projector\..*",
)
"""Tensors of Kimi-K2.5 that see images."""


def deepseek_v2(config: Config, max_seq_len: int) -> DecoderSpec:
    """DeepseekV2ForCausalLM: the likeliest experts, of the groups with the likeliest of all."""
    config = config.with_defaults(**_V2_DEFAULTS)
    config.require("scoring_func", ("softmax",), "softmax")
    config.require("rope_interleave", (True,), True)
    config.require("mlp_bias", (False,), False)
    # Transformers does not renormalise, DeepSeek's own code does, without the scale.
    config.require("norm_topk_prob", (False,), False)
    if config.require("topk_method", ("greedy", "group_limited_greedy"), "greedy") == "greedy":
        config = Config({**config.fields, "n_group": 1, "topk_group": 1})
    return latent_mixture(config, "deepseek_v2", max_seq_len, _softmax_router)


def deepseek_v3(config: Config, max_seq_len: int) -> DecoderSpec:
    """DeepseekV3ForCausalLM: V3, R1, V3.1 and Kimi-K2."""
    config = config.with_defaults(**_V3_DEFAULTS)
    config.require("scoring_func", ("sigmoid",), "sigmoid")
    config.require("topk_method", ("noaux_tc",), "noaux_tc")
    return latent_mixture(config, "deepseek_v3", max_seq_len, biased_router)


def youtu(config: Config, max_seq_len: int) -> DecoderSpec:
    """YoutuForCausalLM: all layers are dense."""
    config = config.with_defaults(tie_word_embeddings=True, first_k_dense_replace=0)
    return latent_mixture(config, "youtu", max_seq_len, biased_router, is_dense=lambda index: True)


def deepseek_v32(config: Config, max_seq_len: int) -> DecoderSpec:
    """DeepseekV32ForCausalLM: V3's layers, each with an indexer."""
    config = config.with_defaults(**_V32_DEFAULTS)

    def selecting(index: int, prefix: str, mixer: LatentAttentionSpec) -> LatentAttentionSpec:
        own = indexer(config, prefix, max_seq_len, interleaved=False)
        return dataclasses.replace(mixer, indexer=own)

    return sparse_mixture(config, "deepseek_v32", max_seq_len, selecting)


def sparse_mixture(
    config: Config, family: str, max_seq_len: int, selecting: Selecting
) -> DecoderSpec:
    """DeepSeek-V3's layers with attention to selected tokens."""
    config.require("scoring_func", ("sigmoid",), "sigmoid")
    config.require("topk_method", ("noaux_tc",), "noaux_tc")
    config.require("rope_interleave", (True,), True)
    return latent_mixture(
        config,
        family,
        max_seq_len,
        biased_router,
        is_dense=dense_layers(config),
        selecting=selecting,
    )


def dense_layers(config: Config) -> Callable[[int], bool] | None:
    """Whether layer i has no experts, by `mlp_layer_types`; None: the field is absent.

    Raises:
        UnsupportedError, CheckpointError: as `common.types_of_layers`.
    """
    kinds = common.types_of_layers(
        config, "mlp_layer_types", (_DENSE, _SPARSE), f"trtc knows {_DENSE} and {_SPARSE}"
    )
    return None if kinds is None else lambda index: kinds[index] == _DENSE


def kimi_k25(config: Config, max_seq_len: int) -> DecoderSpec:
    """The text model in KimiK25ForConditionalGeneration."""
    spec = deepseek_v3(config.with_defaults(n_group=1, topk_group=1), max_seq_len)
    return dataclasses.replace(spec, ignored_tensors=(*spec.ignored_tensors, *_OTHER_PARTS))


def latent_mixture(
    config: Config,
    family: str,
    max_seq_len: int,
    router: Router,
    *,
    is_dense: Callable[[int], bool] | None = None,
    query_scale: QueryScale | None = None,
    selecting: Selecting | None = None,
) -> DecoderSpec:
    """Layers of latent attention, the first of them dense and all others with experts.

    Args:
        is_dense: whether layer i has no experts; None: the first `first_k_dense_replace` have none.
        selecting: None: attention is to all tokens.
    """
    config.require("moe_layer_freq", (1,), 1)
    rope = latent_rope(config, max_seq_len)
    num_dense = config.integer("first_k_dense_replace", least=0)

    def layer(index: int, prefix: str) -> LayerSpec:
        mixer = latent_attention(config, prefix, rope, query_scale)
        if selecting is not None:
            mixer = selecting(index, prefix, mixer)
        name = f"{prefix}.mlp"
        if index < num_dense if is_dense is None else is_dense(index):
            width, act = config.integer("intermediate_size"), common.activation(config)
            return common.layer_spec(
                config, prefix, mixer, common.gated_mlp(config, name, width, act)
            )
        experts = mixture.routed_and_shared(config, name, router(config, f"{name}.gate"))
        return common.layer_spec(config, prefix, mixer, experts)

    spec = common.decoder(config, family, layer)
    # The layer of multi-token prediction lies behind the others.
    extra = rf"model\.layers\.{len(spec.layers)}\..*"
    return dataclasses.replace(spec, ignored_tensors=(*spec.ignored_tensors, extra))


def biased_router(config: Config, name: str) -> RouterSpec:
    """By sigmoid and a bias that only chooses (`noaux_tc`)."""
    bias = ChoiceBias(f"{name}.e_score_correction_bias")
    number = config.integer("n_routed_experts")
    return mixture.sigmoid_router(config, name, number, bias, epsilon=1e-20)


def _softmax_router(config: Config, name: str) -> RouterSpec:
    number = config.integer("n_routed_experts")
    router = mixture.grouped_router(config, name, number, "softmax", "max")
    return dataclasses.replace(router, renormalize=False)
