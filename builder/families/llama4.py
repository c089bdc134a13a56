"""Llama 4 text: attention within chunks, layers without a rotary embedding, weighted experts."""

from dataclasses import replace

from trtc.builder.families import common, mixture
from trtc.builder.families.config import Config, shown
from trtc.builder.families.rope import rope_spec
from trtc.builder.spec import (
    NO_ROPE,
    AttentionSpec,
    DecoderSpec,
    DenseMlpSpec,
    LayerSpec,
    LinearSpec,
    MoeMlpSpec,
    NormSpec,
    QueryScale,
    RopeSpec,
    RouterSpec,
)
from trtc.protos.errors import CheckpointError

_DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "intermediate_size_mlp": 16384,
    "attention_chunk_size": 8192,
    "floor_scale": 8192,
    "attn_scale": 0.1,
}
"""What a published config.json may leave out."""
_THETA = 500000.0
_OTHER_PARTS = (r"(model\.)?vision_model\..*", r"(model\.)?multi_modal_projector\..*")
"""Tensors of Llama4ForConditionalGeneration that see images."""


def llama4(config: Config, max_seq_len: int) -> DecoderSpec:
    """Llama4ForCausalLM, and the text model in Llama4ForConditionalGeneration."""
    config = config.with_defaults(**_DEFAULTS)
    if not config.sequence("no_rope_layers"):
        config = Config({**config.fields, "no_rope_layers": None})
    has_rope = common.rope_layers(config)
    rope = rope_spec(config, common.head_dim(config), max_seq_len, default_theta=_THETA)
    sparse = _sparse_layers(config)
    width, act = config.integer("intermediate_size_mlp"), common.activation(config)

    def layer(index: int, prefix: str) -> LayerSpec:
        attention = _attention(config, index, prefix, rope if has_rope[index] else NO_ROPE)
        name = f"{prefix}.feed_forward"
        mlp: DenseMlpSpec | MoeMlpSpec
        if index in sparse:
            mlp = _experts(config, name)
        else:
            mlp = common.gated_mlp(config, name, width, act)
        return common.layer_spec(config, prefix, attention, mlp)

    spec = common.decoder(config, "llama4", layer)
    return replace(spec, ignored_tensors=(*spec.ignored_tensors, *_OTHER_PARTS))


def _attention(config: Config, index: int, prefix: str, rope: RopeSpec) -> AttentionSpec:
    """Heads that turn are normalised after that; those that do not are scaled by their position."""
    turns = rope is not NO_ROPE
    kind = common.layer_type(
        config,
        index,
        common.CHUNKED if turns else common.FULL,
        known=(common.FULL, common.CHUNKED),
    )
    bias = config.flag("attention_bias", False)
    attention = common.attention(
        config,
        prefix,
        rope,
        dim=common.head_dim(config),
        qkv_bias=bias,
        o_bias=bias,
        interleaved=True,
        window=config.integer("attention_chunk_size") if kind == common.CHUNKED else None,
    )
    norm = None
    if turns and config.flag("use_qk_norm", True):
        norm = NormSpec(None, config.number("rms_norm_eps"))
    return replace(
        attention,
        chunked=kind == common.CHUNKED,
        q_norm=norm,
        k_norm=norm,
        norm_after_rope=norm is not None,
        query_scale=None if turns else _query_scale(config),
    )


def _query_scale(config: Config) -> QueryScale | None:
    """Older configs say 4 in place of true.

    Raises:
        CheckpointError: `attn_temperature_tuning` is neither a truth value nor a number.
    """
    tuned = config.get("attn_temperature_tuning")
    tuned = True if tuned is None else tuned
    if not isinstance(tuned, bool | int):
        raise CheckpointError(
            f"is {shown(tuned)}, not true or false", field="config.json: attn_temperature_tuning"
        )
    if not tuned:
        return None
    return QueryScale(config.number("attn_scale"), config.integer("floor_scale"), offset=1)


def _sparse_layers(config: Config) -> frozenset[int]:
    """Layers with experts: `moe_layers`, else every `interleave_moe_layer_step`-th.

    Raises:
        CheckpointError: `moe_layers` lists what is no layer.
    """
    layers = config.integer("num_hidden_layers")
    given = config.sequence("moe_layers")
    if given is None:
        step = config.integer("interleave_moe_layer_step", 1)
        return frozenset(range(step - 1, layers, step))
    for one in given:
        if not isinstance(one, int) or isinstance(one, bool):
            raise CheckpointError(
                f"has {shown(one)}, not the number of a layer", field="config.json: moe_layers"
            )
    return frozenset(given)


def _experts(config: Config, prefix: str) -> MoeMlpSpec:
    """Each row's experts read the row times their weight; a shared one reads it as it is."""
    hidden, width = config.integer("hidden_size"), config.integer("intermediate_size")
    number = mixture.num_experts(config, 16)
    router = RouterSpec(
        LinearSpec(f"{prefix}.router", hidden, number),
        mixture.experts_per_token(config, number, 1),
        score="sigmoid",
        renormalize=False,
        weighs_inputs=True,
    )
    experts = MoeMlpSpec(
        router,
        mixture.gated_experts(config, prefix, number, width),
        fused_transposed=True,
    )
    shared = common.gated_mlp(config, f"{prefix}.shared_expert", width, common.activation(config))
    return mixture.with_shared_expert(experts, shared)
