"""Mistral Small 4: DeepSeek-V3's layers, with a softmax router and queries scaled by position."""

import dataclasses

from trtc.builder.families import mixture
from trtc.builder.families.config import Config
from trtc.builder.families.deepseek import latent_mixture
from trtc.builder.families.ministral3 import OTHER_PARTS, ministral3
from trtc.builder.families.rope import query_scale
from trtc.builder.spec import DecoderSpec, RouterSpec

_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_DEFAULTS = {
    "first_k_dense_replace": 0,
    "n_routed_experts": 128,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 2048,
}


def mistral3(config: Config, max_seq_len: int) -> DecoderSpec:
    """The text model in Mistral3ForConditionalGeneration: Mistral 4, Ministral 3 or older."""
    is_mistral4 = config.get("model_type") == "mistral4"
    return (mistral4 if is_mistral4 else ministral3)(config, max_seq_len)


def mistral4(config: Config, max_seq_len: int) -> DecoderSpec:
    """Mistral4ForCausalLM."""
    config = config.with_defaults(**_DEFAULTS)
    if config.get("rope_scaling") is None:
        config = config.with_defaults(rope_parameters=_ROPE)
    spec = latent_mixture(config, "mistral4", max_seq_len, _router, query_scale=query_scale(config))
    return dataclasses.replace(spec, ignored_tensors=(*spec.ignored_tensors, *OTHER_PARTS))


def _router(config: Config, name: str) -> RouterSpec:
    number = config.integer("n_routed_experts")
    router = mixture.grouped_router(config, name, number, "softmax")
    renormalize = config.flag("norm_topk_prob", True)
    return dataclasses.replace(router, renormalize=renormalize, epsilon=1e-20)
