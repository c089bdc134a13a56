"""Dense decoders that differ from Llama in flags: attention and a gated MLP in every layer."""

from collections.abc import Callable
from dataclasses import dataclass

from trtc.builder.families import common
from trtc.builder.families.config import Config
from trtc.builder.families.rope import rope_spec
from trtc.builder.spec import NO_ROPE, DecoderSpec, LayerSpec, QkNorm, RopeSpec


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
) -> DecoderSpec:
    """A dense decoder.

    Args:
        window: of a layer, by its index.
        rope: of a layer; None: config.json's, which all layers share.
        has_rope: whether a layer rotates q and k at all.
    """
    dim = common.head_dim(config)
    act = common.activation(config)
    intermediate = config.integer("intermediate_size")
    if rope is None:
        shared = rope_spec(config, dim, max_seq_len, default_theta=differs.theta)

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
        mlp = common.gated_mlp(config, f"{prefix}.mlp", intermediate, act, bias=differs.mlp_bias)
        return common.layer_spec(config, prefix, attention, mlp, differs.norms)

    return common.decoder(config, differs.family, layer, tied_by_default=differs.tied)
