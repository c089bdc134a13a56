"""Gemma 4: two sizes of heads by layer type, values that are normalised and may be the keys, layers
that read the keys and values of others, an input of each layer by the token (E2B, E4B), routed
experts beside an MLP (26B-A4B), and a number that scales each layer."""

import dataclasses
import math
import re
from typing import Any

from trtc.builder.families import common
from trtc.builder.families.config import Config, shown
from trtc.builder.families.rope import rope_by_layer_type
from trtc.builder.spec import (
    Activation,
    BranchNorms,
    DecoderSpec,
    DenseMlpSpec,
    LayerInputSpec,
    LayerInputsSpec,
    LayerSpec,
    LinearSpec,
    MoeMlpSpec,
    NormSpec,
    RopeSpec,
    RouterSpec,
)
from trtc.protos.errors import CheckpointError, UnsupportedError

_DEFAULTS = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
    "rope_parameters": {
        common.SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        common.FULL: {
            "rope_type": "proportional",
            "rope_theta": 1e6,
            "partial_rotary_factor": 0.25,
        },
    },
}
"""What the text part of a published config.json leaves out."""
_UNIFIED_DEFAULTS = {
    "max_position_embeddings": 262144,
    "sliding_window": 1024,
    "hidden_size_per_layer_input": 0,
}
_GLOBAL_HEAD_DIM = 512
_INPUT_ROWS = 262144
_PATTERN = 6
_OVERRIDES = frozenset({"head_dim", "num_key_value_heads"})
"""Fields that layers may have values of their own of."""
_LAYER = re.compile(r"[0-9]{1,9}")
_OTHER_PARTS = (
    r"(model\.)?(vision_tower|vision_embedder|audio_tower|audio_embedder)\..*",
    r"(model\.)?(embed_vision|embed_audio|multi_modal_projector)\..*",
)
"""Tensors of the parts that see and hear."""


def gemma4(config: Config, max_seq_len: int) -> DecoderSpec:
    """Gemma4ForCausalLM, and the text model in Gemma4ForConditionalGeneration."""
    config = config.with_defaults(**_DEFAULTS)
    # "vision": what text alone does not use.
    config.require("use_bidirectional_attention", ("vision",), "vision")
    own = _own_fields(config)
    layers = tuple(
        _layer_config(config, own, n) for n in range(config.integer("num_hidden_layers"))
    )
    ropes = _ropes(config, layers, max_seq_len)
    sources = _kv_sources(config)
    # Layers that read another's keys and values are the last ones, and may have wider MLPs.
    input_width = config.integer("hidden_size_per_layer_input", least=0)
    has_experts = config.flag("enable_moe_block", False)
    widening = 2 if config.flag("use_double_wide_mlp", False) else 1
    act = common.activation(config, "hidden_activation", "gelu_pytorch_tanh")
    bias = config.flag("attention_bias", False)
    keys_are_values = config.flag("attention_k_eq_v", False)
    intermediate = config.integer("intermediate_size")

    def layer(index: int, prefix: str) -> LayerSpec:
        def norm(name: str) -> NormSpec:
            return common.norm(config, f"{prefix}.{name}")

        kind, source = _layer_type(config, index), sources[index]
        attention = common.attention(
            layers[index if source is None else source],
            prefix,
            ropes[kind],
            dim=layers[index].integer("head_dim"),
            qkv_bias=bias,
            o_bias=bias,
            qk_norm="head",
            window=config.integer("sliding_window") if kind == common.SLIDING else None,
        )
        if source is not None:
            attention = dataclasses.replace(attention, k=None, v=None, k_norm=None, kv_layer=source)
        else:
            is_k = keys_are_values and kind == common.FULL
            attention = dataclasses.replace(
                attention,
                v=None if is_k else attention.v,
                v_norm=dataclasses.replace(norm("self_attn.v_norm"), weight=None),
            )
        width = intermediate * (1 if source is None else widening)
        mlp = common.gated_mlp(config, f"{prefix}.mlp", width, act)
        return LayerSpec(
            mixer=dataclasses.replace(attention, scale=1.0),
            mlp=_with_experts(config, prefix, mlp) if has_experts else mlp,
            attention_norm=norm("input_layernorm"),
            mlp_norm=norm("pre_feedforward_layernorm"),
            attention_post_norm=norm("post_attention_layernorm"),
            mlp_post_norm=norm("post_feedforward_layernorm"),
            input=_layer_input(config, prefix, input_width, act) if input_width else None,
            scalar=f"{prefix}.layer_scalar",
        )

    spec = common.decoder(
        config,
        "gemma4",
        layer,
        tied_by_default=True,
        embedding_scale=math.sqrt(config.integer("hidden_size")),
        logit_softcap=config.optional_number("final_logit_softcapping"),
    )
    unused = tuple(
        rf".*\.layers\.{index}\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\..*"
        for index, source in enumerate(sources)
        if source is not None
    )
    return dataclasses.replace(
        spec,
        layer_inputs=_layer_inputs(config, input_width) if input_width else None,
        ignored_tensors=(*spec.ignored_tensors, *unused, *_OTHER_PARTS),
    )


def _with_experts(config: Config, prefix: str, mlp: DenseMlpSpec) -> MoeMlpSpec:
    """The layer's MLP beside routed experts.

    Raises:
        CheckpointError: more experts of a token than there are.
    """
    hidden, number = config.integer("hidden_size"), config.integer("num_experts")
    top_k, width = config.integer("top_k_experts"), config.integer("moe_intermediate_size")
    if top_k > number:
        raise CheckpointError(
            f"is {top_k}, and there are {number} experts", field="config.json: top_k_experts"
        )

    def norm(name: str) -> NormSpec:
        return common.norm(config, f"{prefix}.{name}")

    for_router = dataclasses.replace(
        norm("router"), weight=f"{prefix}.router.scale", multiplier=hidden**-0.5
    )
    return MoeMlpSpec(
        router=RouterSpec(
            LinearSpec(f"{prefix}.router.proj", hidden, number),
            top_k,
            expert_scale=f"{prefix}.router.per_expert_scale",
        ),
        experts=tuple(
            common.gated_mlp(config, f"{prefix}.experts.{expert}", width, mlp.activation)
            for expert in range(number)
        ),
        shared=mlp,
        norms=BranchNorms(
            router=for_router,
            experts=norm("pre_feedforward_layernorm_2"),
            experts_post=norm("post_feedforward_layernorm_2"),
            shared_post=norm("post_feedforward_layernorm_1"),
        ),
    )


def _layer_input(config: Config, prefix: str, width: int, act: Activation) -> LayerInputSpec:
    hidden = config.integer("hidden_size")
    return LayerInputSpec(
        gate=LinearSpec(f"{prefix}.per_layer_input_gate", hidden, width),
        projection=LinearSpec(f"{prefix}.per_layer_projection", width, hidden),
        norm=common.norm(config, f"{prefix}.post_per_layer_input_norm"),
        activation=act,
    )


def _layer_inputs(config: Config, width: int) -> LayerInputsSpec:
    """
    Raises:
        CheckpointError: tokens without a row of the table.
    """
    hidden, vocab = config.integer("hidden_size"), config.integer("vocab_size")
    rows = config.integer("vocab_size_per_layer_input", _INPUT_ROWS)
    if rows < vocab:
        raise CheckpointError(
            f"is {rows}, and vocab_size is {vocab}",
            field="config.json: vocab_size_per_layer_input",
        )
    norm = common.norm(config, "model.per_layer_projection_norm")
    return LayerInputsSpec(
        table="model.embed_tokens_per_layer.weight",
        rows=rows,
        width=width,
        projection=LinearSpec(
            "model.per_layer_model_projection", hidden, config.integer("num_hidden_layers") * width
        ),
        # Transformers divides what the norm reads by sqrt(hidden_size) first.
        norm=dataclasses.replace(norm, eps=norm.eps * hidden),
        table_scale=math.sqrt(width),
        scale=math.sqrt(0.5),
    )


def gemma4_unified(config: Config, max_seq_len: int) -> DecoderSpec:
    """The text model in Gemma4UnifiedForConditionalGeneration, which has other defaults."""
    return gemma4(config.with_defaults(**_UNIFIED_DEFAULTS), max_seq_len)


def _layer_type(config: Config, index: int) -> str:
    """Five sliding layers to a full one, unless `layer_types` says otherwise; the last layer is
    always full, as in Transformers."""
    is_last = index == config.integer("num_hidden_layers") - 1
    kind = common.layer_type(
        config, index, common.SLIDING if (index + 1) % _PATTERN else common.FULL
    )
    return common.FULL if is_last else kind


def _own_fields(config: Config) -> dict[int, dict[str, Any]] | None:
    """By layer, `per_layer_config`, as newer Transformers save it: with numbers of one length, "05"
    beside "11". None: there is none.

    Raises:
        CheckpointError: it is no object of objects, or names what is no layer.
    """
    given = config.get("per_layer_config")
    if given is None:
        return None
    where = "config.json: per_layer_config"
    if not isinstance(given, dict) or not all(isinstance(own, dict) for own in given.values()):
        raise CheckpointError(f"is {shown(given)}, not an object of each layer", field=where)
    for name in given:
        if not _LAYER.fullmatch(name):
            raise CheckpointError(f"names {shown(name)}, which is no layer", field=where)
    return {int(name): own for name, own in given.items()}


def _layer_config(
    config: Config, own_fields: dict[int, dict[str, Any]] | None, index: int
) -> Config:
    """The config with what is a layer's own: `own_fields`, or in full layers `global_head_dim` and
    `num_global_key_value_heads`.

    Raises:
        UnsupportedError: a layer has a field of its own that trtc does not read by layer.
        CheckpointError: a field is no number.
    """
    if own_fields is not None:
        own = own_fields.get(index, {})
        if unknown := sorted(set(map(str, own)) - _OVERRIDES):
            raise UnsupportedError(
                f"{shown(unknown[0])} of layer {index} is not supported",
                field="config.json: per_layer_config",
                remedy=f"trtc builds this family only with {' and '.join(sorted(_OVERRIDES))}",
            )
        return Config({**config.fields, **own})
    if _layer_type(config, index) == common.SLIDING:
        return config
    heads = config.integer("num_key_value_heads")
    if config.flag("attention_k_eq_v", False):
        heads = config.integer("num_global_key_value_heads", heads)
    dim = config.integer("global_head_dim", _GLOBAL_HEAD_DIM)
    return Config({**config.fields, "head_dim": dim, "num_key_value_heads": heads})


def _kv_sources(config: Config) -> tuple[int | None, ...]:
    """For each layer, whose keys and values it reads, None: its own. The last
    `num_kv_shared_layers` read those of the last layer before them that is of their type.

    Raises:
        CheckpointError: there is no such layer.
    """
    number = config.integer("num_hidden_layers")
    field = "num_kv_shared_layers"
    first = number - config.integer(field, 0, least=0)
    last: dict[str, int] = {}
    sources: list[int | None] = []
    for index in range(number):
        kind = _layer_type(config, index)
        if index < first:
            last[kind] = index
            sources.append(None)
        elif kind in last:
            sources.append(last[kind])
        else:
            raise CheckpointError(
                f"leaves no layer before layer {index} that is {kind}",
                field=f"config.json: {field}",
            )
    return tuple(sources)


def _ropes(config: Config, layers: tuple[Config, ...], max_seq_len: int) -> dict[str, RopeSpec]:
    """By layer type, for heads of the size that the layers of the type have.

    Raises:
        UnsupportedError: layers of one type differ in the size of their heads.
    """
    sizes: dict[str, int] = {}
    for index, layer in enumerate(layers):
        size = layer.integer("head_dim")
        if sizes.setdefault(_layer_type(config, index), size) != size:
            raise UnsupportedError(
                f"head_dim {size} of layer {index} is not that of other layers of its type",
                field="config.json: per_layer_config",
            )
    return {
        kind: rope_by_layer_type(config, kind, size, max_seq_len, default_theta=1e4)
        for kind, size in sizes.items()
    }
