"""Granite 3 with experts: Granite's multipliers."""

from trtc.builder.families import common, mixture
from trtc.builder.families.config import Config
from trtc.builder.families.granite import with_multipliers
from trtc.builder.families.rope import rope_spec
from trtc.builder.spec import (
    DecoderSpec,
    DenseMlpSpec,
    LayerSpec,
    LinearSpec,
    MoeMlpSpec,
    RouterSpec,
)


def granite_moe(config: Config, max_seq_len: int) -> DecoderSpec:
    """GraniteMoeForCausalLM."""
    return _granite(config, max_seq_len, "granite_moe")


def granite_moe_shared(config: Config, max_seq_len: int) -> DecoderSpec:
    """GraniteMoeSharedForCausalLM: an MLP that all rows share beside the experts."""
    return _granite(
        config,
        max_seq_len,
        "granite_moe_shared",
        shared=config.integer("shared_intermediate_size", 1024, least=0),
    )


def _granite(config: Config, max_seq_len: int, family: str, shared: int = 0) -> DecoderSpec:
    config.require("normalization_function", ("rmsnorm",), "rmsnorm")
    config.require("position_embedding_type", ("rope",), "rope")
    dim = common.head_dim(config)
    rope = rope_spec(config, dim, max_seq_len)
    bias = config.flag("attention_bias", False)

    def layer(_index: int, prefix: str) -> LayerSpec:
        attention = common.attention(config, prefix, rope, dim=dim, qkv_bias=bias, o_bias=bias)
        mlp = granite_mlp(config, prefix, mixture.num_experts(config, 8), shared)
        return common.layer_spec(config, prefix, attention, mlp)

    return with_multipliers(config, common.decoder(config, family, layer))


def granite_mlp(config: Config, layer: str, experts: int, shared: int) -> DenseMlpSpec | MoeMlpSpec:
    """Routed experts, and an MLP `shared` wide for all rows; without experts the MLP alone, and
    without that, where `shared` is 0, the experts alone."""
    mlp = _shared(config, f"{layer}.shared_mlp", shared)
    if not experts:
        return mlp
    routed = _experts(config, f"{layer}.block_sparse_moe", experts)
    return mixture.with_shared_expert(routed, mlp) if shared else routed


def _experts(config: Config, prefix: str, number: int) -> MoeMlpSpec:
    router = LinearSpec(f"{prefix}.router.layer", config.integer("hidden_size"), number)
    width = config.integer("intermediate_size")
    return MoeMlpSpec(
        RouterSpec(router, mixture.experts_per_token(config, number, 2)),
        mixture.gated_experts(config, prefix, number, width),
    )


def _shared(config: Config, prefix: str, width: int) -> DenseMlpSpec:
    hidden, both = config.integer("hidden_size"), f"{prefix}.input_linear"
    return DenseMlpSpec(
        gate=LinearSpec(both, hidden, width, rows=(0, width)),
        up=LinearSpec(both, hidden, width, rows=(width, 2 * width)),
        down=LinearSpec(f"{prefix}.output_linear", width, hidden),
        activation=common.activation(config),
    )
