"""Granite 4 hybrids: Mamba-2 layers, attention on some, an MLP for all rows and routed experts."""

from trtc.builder.families import common, mamba
from trtc.builder.families.config import Config
from trtc.builder.families.granite import with_multipliers
from trtc.builder.families.granite_moe import granite_mlp
from trtc.builder.families.rope import rope_spec
from trtc.builder.spec import NO_ROPE, DecoderSpec, LayerSpec, MixerSpec
from trtc.protos.errors import CheckpointError

_KINDS = (mamba.MAMBA, common.FULL)


def granite_moe_hybrid(config: Config, max_seq_len: int) -> DecoderSpec:
    """GraniteMoeHybridForCausalLM, which may have no routed experts."""
    config.require("hidden_act", tuple(common.SILU), "silu")
    rotates = config.require("position_embedding_type", (None, "nope", "rope"), None) == "rope"
    dim = common.head_dim(config)
    rope = rope_spec(config, dim, max_seq_len) if rotates else NO_ROPE
    bias = config.flag("attention_bias", False)
    kinds, sizes = _layer_kinds(config), mamba.sizes(config)
    experts = config.integer("num_local_experts", 8, least=0)
    shared = config.integer("shared_intermediate_size", 1024)

    def mixer(index: int, prefix: str) -> MixerSpec:
        if kinds[index] == mamba.MAMBA:
            return mamba.mamba2(config, f"{prefix}.mamba", sizes)
        return common.attention(config, prefix, rope, dim=dim, qkv_bias=bias, o_bias=bias)

    def layer(index: int, prefix: str) -> LayerSpec:
        mlp = granite_mlp(config, prefix, experts, shared)
        return common.layer_spec(config, prefix, mixer(index, prefix), mlp)

    return with_multipliers(config, common.decoder(config, "granite_moe_hybrid", layer))


def _layer_kinds(config: Config) -> tuple[str, ...]:
    """Of each layer: `layer_types`, or Mamba-2 everywhere.

    Raises:
        CheckpointError: they are too few.
        UnsupportedError: a layer type that trtc does not have.
    """
    number = config.integer("num_hidden_layers")
    kinds = mamba.layer_kinds(config, "layer_types", _KINDS) or (mamba.MAMBA,) * number
    if len(kinds) < number:
        raise CheckpointError(
            f"names {len(kinds)} layers of {number}", field="config.json: layer_types"
        )
    return kinds
