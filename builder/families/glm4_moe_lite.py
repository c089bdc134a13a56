"""GLM-4.7-Flash: DeepSeek-V3's layers."""

from trtc.builder.families.config import Config, shown
from trtc.builder.families.deepseek import biased_router, latent_mixture
from trtc.builder.spec import DecoderSpec
from trtc.protos.errors import CheckpointError, UnsupportedError

_DEFAULTS = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1536,
    "routed_scaling_factor": 1.8,
    "rms_norm_eps": 1e-5,
}
_DENSE, _SPARSE = "dense", "sparse"
_FIELD = "config.json: mlp_layer_types"


def glm4_moe_lite(config: Config, max_seq_len: int) -> DecoderSpec:
    """Glm4MoeLiteForCausalLM."""
    config = config.with_defaults(**_DEFAULTS)
    kinds = _mlp_types(config)
    return latent_mixture(
        config,
        "glm4_moe_lite",
        max_seq_len,
        biased_router,
        is_dense=None if kinds is None else lambda index: kinds[index] == _DENSE,
    )


def _mlp_types(config: Config) -> tuple[str, ...] | None:
    """Of the layers; None: `first_k_dense_replace` says which are dense.

    Raises:
        UnsupportedError: a type that trtc does not have.
        CheckpointError: they are too few.
    """
    kinds = config.sequence("mlp_layer_types")
    if kinds is None:
        return None
    layers = config.integer("num_hidden_layers")
    if len(kinds) < layers:
        raise CheckpointError(f"names {len(kinds)} layers of {layers}", field=_FIELD)
    for kind in kinds:
        if kind not in (_DENSE, _SPARSE):
            raise UnsupportedError(
                f"layer type {shown(kind)} is not supported",
                field=_FIELD,
                remedy=f"trtc knows {_DENSE} and {_SPARSE}",
            )
    return kinds
