"""What a decoder is made of, in words: for lists and for people who ask why."""

from collections.abc import Callable, Mapping

from trtc.builder.spec import (
    NO_ROPE,
    AttentionSpec,
    DecoderSpec,
    DenseMlpSpec,
    GatedDeltaSpec,
    LayerSpec,
    Mamba1Spec,
    Mamba2Spec,
    MoeMlpSpec,
    NormSpec,
    ShortConvSpec,
)

_Test = Callable[[DecoderSpec], bool]


def features(spec: DecoderSpec) -> tuple[str, ...]:
    """The primitives that a spec uses beside those of Llama, in the order of the table."""
    return tuple(name for name, has in FEATURES.items() if has(spec))


def _any_attention(test: Callable[[AttentionSpec], bool]) -> _Test:
    return lambda spec: any(test(attention) for _, attention in spec.attentions)


def _any_layer(test: Callable[[LayerSpec], bool]) -> _Test:
    return lambda spec: any(test(layer) for layer in spec.layers)


def _any_norm(test: Callable[[NormSpec], bool]) -> _Test:
    return lambda spec: test(spec.final_norm)


def _gateless(layer: LayerSpec) -> bool:
    return isinstance(layer.mlp, DenseMlpSpec) and layer.mlp.gate is None


def _any_mixture(test: Callable[[MoeMlpSpec], bool]) -> _Test:
    return _any_layer(lambda layer: isinstance(layer.mlp, MoeMlpSpec) and test(layer.mlp))


FEATURES: Mapping[str, _Test] = {
    "LayerNorm": _any_norm(lambda norm: norm.centered),
    "norm weights plus 1": _any_norm(lambda norm: norm.unit_offset),
    "norms after": _any_layer(lambda layer: layer.attention_post_norm is not None),
    "no norms before": _any_layer(
        lambda layer: layer.mixer is not None and layer.attention_norm is None
    ),
    "mixers and MLPs in layers of their own": _any_layer(
        lambda layer: layer.mixer is None or layer.mlp is None
    ),
    "parallel residual": _any_layer(lambda layer: layer.parallel),
    "q and k norms by head": _any_attention(
        lambda one: one.q_norm is not None and one.qk_norm == "head"
    ),
    "q and k norms over all heads": _any_attention(
        lambda one: one.q_norm is not None and one.qk_norm == "row"
    ),
    "q and k norms after rotation": _any_attention(lambda one: one.norm_after_rope),
    "q, k, v biases": _any_attention(lambda one: one.q.has_bias),
    "norms of values": _any_attention(lambda one: one.v_norm is not None),
    "values that are keys": _any_attention(lambda one: one.k is not None and one.v is None),
    "layers that read other layers' keys": _any_attention(lambda one: one.kv_layer is not None),
    "layers that differ in heads": lambda spec: (
        len({(one.num_kv_heads, one.head_dim) for _, one in spec.attentions}) > 1
    ),
    "sliding windows": _any_attention(lambda one: one.window is not None and not one.chunked),
    "chunked attention": _any_attention(lambda one: one.chunked),
    "layers without rotary embedding": lambda spec: (
        any(one.rope is NO_ROPE for _, one in spec.attentions)
        or any(not any(one.rope.inv_freq) for _, one in spec.latent_attentions)
    ),
    "interleaved rotary embedding": _any_attention(lambda one: one.q.interleaved is not None),
    "partial rotary embedding": _any_attention(
        lambda one: one.rope is not NO_ROPE and one.rope.rotary_dim < one.head_dim
    ),
    "rotary embedding by layer type": lambda spec: (
        len({one.rope for _, one in spec.attentions} - {NO_ROPE}) > 1
    ),
    "queries scaled by position": lambda spec: (
        any(one.query_scale is not None for _, one in spec.attentions)
        or any(one.query_scale is not None for _, one in spec.latent_attentions)
    ),
    "attention sinks": _any_attention(lambda one: one.sinks is not None),
    "attention softcap": _any_attention(lambda one: one.softcap is not None),
    "lm_head bias": lambda spec: spec.lm_head.has_bias,
    "MLP without gate": _any_layer(_gateless),
    "routed experts": _any_mixture(lambda mlp: True),
    "experts without gate": _any_mixture(lambda mlp: mlp.experts[0].gate is None),
    "latent experts": _any_mixture(lambda mlp: mlp.latent is not None),
    "clamped experts": _any_mixture(lambda mlp: mlp.experts[0].limit is not None),
    "sigmoid router": _any_mixture(lambda mlp: mlp.router.score == "sigmoid"),
    "sparsemixer router": _any_mixture(lambda mlp: mlp.router.score == "sparsemixer"),
    "experts of weighted inputs": _any_mixture(lambda mlp: mlp.router.weighs_inputs),
    "experts chosen with a bias": _any_mixture(lambda mlp: mlp.router.choice_bias is not None),
    "experts in groups": _any_mixture(lambda mlp: mlp.router.num_groups > 1),
    "router bias": _any_mixture(lambda mlp: mlp.router.linear.has_bias),
    "shared experts": _any_mixture(lambda mlp: mlp.shared is not None),
    "experts and MLP with norms of their own": _any_mixture(lambda mlp: mlp.norms is not None),
    "experts scaled": _any_mixture(lambda mlp: mlp.router.expert_scale is not None),
    "gated shared experts": _any_mixture(lambda mlp: mlp.shared_gate is not None),
    "latent attention": lambda spec: bool(spec.latent_attentions),
    "tokens selected by an indexer": lambda spec: bool(spec.indexers),
    "selections of earlier layers": lambda spec: any(
        one.selection_layer is not None for _, one in spec.latent_attentions
    ),
    "gated attention": _any_attention(lambda one: one.gate is not None),
    "gated delta nets": _any_layer(lambda layer: isinstance(layer.mixer, GatedDeltaSpec)),
    "delta nets that decay by channel": _any_layer(
        lambda layer: isinstance(layer.mixer, GatedDeltaSpec) and layer.mixer.decays > 1
    ),
    "delta nets with negative eigenvalues": _any_layer(
        lambda layer: isinstance(layer.mixer, GatedDeltaSpec) and layer.mixer.write_scale > 1
    ),
    "Mamba layers": _any_layer(lambda layer: isinstance(layer.mixer, Mamba1Spec)),
    "Mamba-2 layers": _any_layer(lambda layer: isinstance(layer.mixer, Mamba2Spec)),
    "short convolutions": _any_layer(lambda layer: isinstance(layer.mixer, ShortConvSpec)),
    "inputs of each layer": lambda spec: spec.layer_inputs is not None,
    "layers scaled": _any_layer(lambda layer: layer.scalar is not None),
    "embedding scale": lambda spec: spec.embedding_scale is not None,
    "logit scale": lambda spec: spec.final_norm.multiplier != 1.0,
    "logit softcap": lambda spec: spec.logit_softcap is not None,
    "tied embeddings": lambda spec: f"{spec.lm_head.name}.weight" == spec.embedding,
}
"""Name -> whether a spec has it."""
