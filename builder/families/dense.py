"""Dense decoders that differ from Llama in flags: attention and an MLP in every layer."""

from collections.abc import Callable
from dataclasses import dataclass

from trtc.builder.families import common
from trtc.builder.families.config import Config
from trtc.builder.families.rope import rope_spec
from trtc.builder.spec import NO_ROPE, DecoderSpec, DenseMlpSpec, LayerSpec, QkNorm, RopeSpec


@dataclass(frozen=True)
class Dense:
    """How a family of dense decoders differs from Llama, whose names its tensors have."""

    family: str
    """Name in manifests."""
    theta: float = 10000.0
    """Base of the rotary embedding where config.json has none."""
    interleaved: bool = False
    """The rotary embedding turns neighbours."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: QkNorm | None = None
    norms: common.NormNames = common.PRE_NORMS
    style: common.NormStyle = common.RMS_NORM
    parallel: bool = False
    """Attention and MLP read the same norm's result, and both are added to the layer's input."""
    tied: bool = False
    """Embeddings are tied where config.json says nothing."""


def dense(
    config: Config,
    max_seq_len: int,
    differs: Dense,
    *,
    window: Callable[[int], int | None] = lambda index: None,
    rope: Callable[[int], RopeSpec] | None = None,
    has_rope: Callable[[int], bool] = lambda index: True,
    mlp: Callable[[str], DenseMlpSpec] | None = None,
    logit_scale: float = 1.0,
) -> DecoderSpec:
    """A dense decoder.

    Args:
        window: of a layer, by its index.
        rope: of a layer; None: config.json's, which all layers share.
        has_rope: whether a layer rotates q and k at all.
        mlp: by its prefix in the checkpoint; None: a gated one with Llama's names.
        logit_scale: multiplies the logits.
    """
    dim = common.head_dim(config)
    if rope is None:
        shared = rope_spec(config, dim, max_seq_len, default_theta=differs.theta)

    def gated_mlp(prefix: str) -> DenseMlpSpec:
        act, width = common.activation(config), config.integer("intermediate_size")
        return common.gated_mlp(config, prefix, width, act, bias=differs.mlp_bias)

    def layer(index: int, prefix: str) -> LayerSpec:
        rotary = shared if rope is None else rope(index)
        attention = common.attention(
            config,
            prefix,
            rotary if has_rope(index) else NO_ROPE,
            dim=dim,
            qkv_bias=differs.qkv_bias,
            o_bias=differs.o_bias,
            qk_norm=differs.qk_norm,
            interleaved=differs.interleaved,
            window=window(index),
        )
        return common.layer_spec(
            config,
            prefix,
            attention,
            (mlp or gated_mlp)(f"{prefix}.mlp"),
            differs.norms,
            differs.style,
            parallel=differs.parallel,
        )

    return common.decoder(
        config,
        differs.family,
        layer,
        tied_by_default=differs.tied,
        style=differs.style,
        logit_scale=logit_scale,
    )
