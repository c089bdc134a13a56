"""GLM-5: DeepSeek-V3.2's layers, some of which have the tokens that an earlier one selected."""

import dataclasses

from trtc.builder.families import common
from trtc.builder.families.config import Config
from trtc.builder.families.deepseek import sparse_mixture
from trtc.builder.families.indexer import indexer
from trtc.builder.spec import DecoderSpec, LatentAttentionSpec
from trtc.protos.errors import CheckpointError

_DEFAULTS = {
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-5,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 2048,
}
_FULL, _SHARED = "full", "shared"
_LETTERS = {"F": _FULL, "S": _SHARED}


def glm_moe_dsa(config: Config, max_seq_len: int) -> DecoderSpec:
    """GlmMoeDsaForCausalLM: GLM-5, 5.1 and 5.2."""
    config = config.with_defaults(**_DEFAULTS)
    kinds = _indexer_types(config)
    if kinds[0] != _FULL:
        raise CheckpointError(
            f"makes the first layer {kinds[0]}, which has no layer before it to share with",
            field="config.json: indexer_types",
        )

    def selecting(index: int, prefix: str, mixer: LatentAttentionSpec) -> LatentAttentionSpec:
        if kinds[index] == _SHARED:
            source = max(layer for layer in range(index) if kinds[layer] == _FULL)
            return dataclasses.replace(mixer, selection_layer=source)
        own = indexer(config, prefix, max_seq_len, interleaved=True)
        return dataclasses.replace(mixer, indexer=own)

    return sparse_mixture(config, "glm_moe_dsa", max_seq_len, selecting)


def _indexer_types(config: Config) -> tuple[str, ...]:
    """Of each layer: by name, by a pattern, or every so many."""
    key = "indexer_types" if config.get("indexer_types") is not None else "index_topk_pattern"
    fields, pattern = config.fields, config.get(key)
    if isinstance(pattern, str):
        fields = {**fields, key: [_LETTERS.get(letter, letter) for letter in pattern]}
    kinds = common.types_of_layers(
        Config(fields), key, (_FULL, _SHARED), f"trtc knows {_FULL} and {_SHARED}"
    )
    if kinds is not None:
        return kinds
    every = max(1, config.integer("index_topk_freq", 1, least=0))
    first = config.integer("index_skip_topk_offset", 2, least=0)
    layers = range(config.integer("num_hidden_layers"))
    return tuple(_SHARED if max(one - first + 1, 0) % every else _FULL for one in layers)
