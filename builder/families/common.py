"""Parts that several families share, by the tensor names that Transformers saves."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from trtc.builder.families.config import Config, shown
from trtc.builder.spec import (
    NO_ROPE,
    Activation,
    AttentionSpec,
    DecoderSpec,
    DenseMlpSpec,
    Interleaved,
    LayerSpec,
    LinearSpec,
    MixerSpec,
    MoeMlpSpec,
    NormSpec,
    QkNorm,
    RopeSpec,
)
from trtc.protos.errors import CheckpointError, UnsupportedError

EMBEDDING = "model.embed_tokens"
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
LINEAR = "linear_attention"
"""Layer types."""
_NO_ROPE_INTERVAL = 4
RELU2: Mapping[str, Activation] = {"relu2": "relu2"}
SILU: Mapping[str, Activation] = {"silu": "silu", "swish": "silu"}
GELU_TANH: Mapping[str, Activation] = {"gelu_pytorch_tanh": "gelu_tanh"}
ACTIVATIONS: Mapping[str, Activation] = {**SILU, **GELU_TANH}


def head_dim(config: Config, default: int | None = None) -> int:
    """D: `head_dim`, else the family's default, else hidden_size / heads.

    Raises:
        CheckpointError: the heads do not divide hidden_size.
    """
    heads = config.integer("num_attention_heads")
    hidden = config.integer("hidden_size")
    given = config.optional_integer("head_dim") or default
    if given is not None:
        return given
    if hidden % heads:
        raise CheckpointError(
            f"{heads} does not divide hidden_size {hidden}",
            field="config.json: num_attention_heads",
        )
    return hidden // heads


def activation(config: Config, key: str = "hidden_act", default: str = "silu") -> Activation:
    """The activation of a gated MLP.

    Raises:
        UnsupportedError: one that trtc does not have.
    """
    return ACTIVATIONS[config.require(key, tuple(ACTIVATIONS), default)]


def plain_mlp(
    config: Config, prefix: str, default: str, *, bias: bool, names: tuple[str, str]
) -> DenseMlpSpec:
    """down(activation(up(x))) under `prefix`, with the activation that `hidden_act` says.

    Raises:
        UnsupportedError: an activation that trtc does not have.
    """
    known = {**ACTIVATIONS, **RELU2}
    hidden, width = config.integer("hidden_size"), config.integer("intermediate_size")
    up, down = names
    return DenseMlpSpec(
        gate=None,
        up=LinearSpec(f"{prefix}.{up}", hidden, width, bias),
        down=LinearSpec(f"{prefix}.{down}", width, hidden, bias),
        activation=known[config.require("hidden_act", tuple(known), default)],
    )


@dataclass(frozen=True)
class NormStyle:
    """What all norms of a family are; see NormSpec."""

    eps: str = "rms_norm_eps"
    """The field of config.json."""
    unit_offset: bool = False
    centered: bool = False
    has_bias: bool = False


RMS_NORM = NormStyle()


def norm(config: Config, name: str, style: NormStyle = RMS_NORM) -> NormSpec:
    """The norm whose tensors begin with `name`."""
    return NormSpec(
        f"{name}.weight",
        config.number(style.eps, 1e-5 if style.centered else 1e-6),
        style.unit_offset,
        style.centered,
        f"{name}.bias" if style.has_bias else None,
    )


def attention(
    config: Config,
    layer: str,
    rope: RopeSpec,
    *,
    dim: int,
    qkv_bias: bool = False,
    o_bias: bool = False,
    qk_norm: QkNorm | None = None,
    interleaved: bool = False,
    window: int | None = None,
    name: str = "self_attn",
) -> AttentionSpec:
    """Separate q, k, v and o projections under `<layer>.<name>`.

    Args:
        interleaved: the rotary embedding turns neighbours: see `Interleaved`.
    """
    heads = config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", heads)
    hidden = config.integer("hidden_size")
    prefix = f"{layer}.{name}"
    pairs = Interleaved(dim, rope.rotary_dim) if interleaved and rope is not NO_ROPE else None
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        scale=dim**-0.5,
        rope=rope,
        q=LinearSpec(f"{prefix}.q_proj", hidden, heads * dim, qkv_bias, interleaved=pairs),
        k=LinearSpec(f"{prefix}.k_proj", hidden, kv_heads * dim, qkv_bias, interleaved=pairs),
        v=LinearSpec(f"{prefix}.v_proj", hidden, kv_heads * dim, qkv_bias),
        o=LinearSpec(f"{prefix}.o_proj", heads * dim, hidden, o_bias),
        q_norm=norm(config, f"{prefix}.q_norm") if qk_norm else None,
        k_norm=norm(config, f"{prefix}.k_norm") if qk_norm else None,
        qk_norm=qk_norm or "head",
        window=window,
    )


def gated_mlp(
    config: Config,
    prefix: str,
    intermediate: int,
    act: Activation,
    *,
    bias: bool = False,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> DenseMlpSpec:
    """down(activation(gate(x)) * up(x)) under `prefix`."""
    hidden = config.integer("hidden_size")
    gate, up, down = names
    return DenseMlpSpec(
        gate=LinearSpec(f"{prefix}.{gate}", hidden, intermediate, bias),
        up=LinearSpec(f"{prefix}.{up}", hidden, intermediate, bias),
        down=LinearSpec(f"{prefix}.{down}", intermediate, hidden, bias),
        activation=act,
    )


def fused_mlp(config: Config, layer: str) -> DenseMlpSpec:
    """gate and up as one tensor, under `<layer>.mlp`."""
    hidden = config.integer("hidden_size")
    width = config.integer("intermediate_size")
    fused = f"{layer}.mlp.gate_up_proj"
    return DenseMlpSpec(
        gate=LinearSpec(fused, hidden, width, rows=(0, width)),
        up=LinearSpec(fused, hidden, width, rows=(width, 2 * width)),
        down=LinearSpec(f"{layer}.mlp.down_proj", width, hidden),
        activation=activation(config),
    )


@dataclass(frozen=True)
class NormNames:
    """Which norms a layer has, by their names in the checkpoint."""

    attention: str | None = None
    mlp: str | None = None
    attention_post: str | None = None
    mlp_post: str | None = None


PARALLEL_NORMS = NormNames(attention="input_layernorm")
"""Before both, as in Cohere's models."""
PRE_NORMS = NormNames(attention="input_layernorm", mlp="post_attention_layernorm")
"""Before attention and MLP, as in Llama."""
POST_NORMS = NormNames(
    attention_post="post_attention_layernorm", mlp_post="post_feedforward_layernorm"
)
"""After attention and MLP, as in OLMo 2."""
SANDWICH_NORMS = NormNames(
    attention="input_layernorm",
    attention_post="post_self_attn_layernorm",
    mlp="post_attention_layernorm",
    mlp_post="post_mlp_layernorm",
)
"""Before and after, as in GLM-4."""


def layer_spec(
    config: Config,
    layer: str,
    mixer: MixerSpec,
    mlp: DenseMlpSpec | MoeMlpSpec,
    norms: NormNames = PRE_NORMS,
    style: NormStyle = RMS_NORM,
    *,
    parallel: bool = False,
) -> LayerSpec:
    """Attention and an MLP, with the norms that `norms` names."""

    def named(name: str | None) -> NormSpec | None:
        return None if name is None else norm(config, f"{layer}.{name}", style)

    return LayerSpec(
        mixer=mixer,
        mlp=mlp,
        attention_norm=named(norms.attention),
        mlp_norm=named(norms.mlp),
        attention_post_norm=named(norms.attention_post),
        mlp_post_norm=named(norms.mlp_post),
        parallel=parallel,
    )


def rope_layers(config: Config) -> tuple[bool, ...]:
    """Of each layer, whether it has a rotary embedding: `no_rope_layers` has 1 where there is one,
    else all but every `no_rope_layer_interval`-th do.

    Raises:
        CheckpointError: it has too few layers, or something else than 0 and 1.
    """
    layers = config.integer("num_hidden_layers")
    given = config.sequence("no_rope_layers")
    if given is None:
        interval = config.integer("no_rope_layer_interval", _NO_ROPE_INTERVAL)
        return tuple((index + 1) % interval != 0 for index in range(layers))
    if len(given) < layers:
        raise CheckpointError(
            f"names {len(given)} layers of {layers}", field="config.json: no_rope_layers"
        )
    for one in given:
        if one not in (0, 1):
            raise CheckpointError(
                f"has {shown(one)}, not 0 or 1", field="config.json: no_rope_layers"
            )
    return tuple(bool(one) for one in given)


def types_of_layers(
    config: Config, key: str, known: tuple[str, ...], remedy: str = ""
) -> tuple[str, ...] | None:
    """The types under `key`, one a layer; None: the field is absent.

    Args:
        known: what the family may have.
        remedy: of a type that is not among them; "": what the family is built with.

    Raises:
        UnsupportedError: a type that trtc does not have.
        CheckpointError: they are too few.
    """
    kinds, layers = config.sequence(key), config.integer("num_hidden_layers")
    if kinds is None:
        return None
    if len(kinds) < layers:
        raise CheckpointError(f"names {len(kinds)} layers of {layers}", field=f"config.json: {key}")
    check_types(kinds, key, known, remedy)
    return kinds


def check_types(kinds: tuple[Any, ...], key: str, known: tuple[str, ...], remedy: str = "") -> None:
    """As `types_of_layers`, of types that were read.

    Raises:
        UnsupportedError: one that trtc does not have.
    """
    for kind in kinds:
        if kind not in known:
            raise UnsupportedError(
                f"layer type {shown(kind)} is not supported",
                field=f"config.json: {key}",
                remedy=remedy or f"trtc builds this family with {' and '.join(known)}",
            )


def layer_type(
    config: Config,
    index: int,
    default_type: str,
    *,
    known: tuple[str, ...] = (FULL, SLIDING),
) -> str:
    """Of layer `index`: `layer_types` decides, else the family's rule.

    Args:
        known: what the family may have.

    Raises:
        UnsupportedError: a layer type that trtc does not have.
        CheckpointError: `layer_types` are too few.
    """
    kinds = config.sequence("layer_types")
    if kinds is not None and len(kinds) < config.integer("num_hidden_layers"):
        raise CheckpointError(
            f"names {len(kinds)} layers of {config.integer('num_hidden_layers')}",
            field="config.json: layer_types",
        )
    kind = default_type if kinds is None else kinds[index]
    if isinstance(kind, str) and kind in known:
        return kind
    raise UnsupportedError(
        f"layer type {shown(kind)} is not supported",
        field="config.json: layer_types",
        remedy=f"trtc knows {' and '.join(known)} in this family",
    )


def window_by_layer_type(config: Config, index: int, default_type: str) -> int | None:
    """The window of layer `index`, by its `layer_type`.

    Raises:
        UnsupportedError, CheckpointError: as `layer_type`; or `sliding_window` does not fit.
    """
    is_sliding = layer_type(config, index, default_type) == SLIDING
    return config.integer("sliding_window") if is_sliding else None


def decoder(
    config: Config,
    family: str,
    layer: Callable[[int, str], LayerSpec],
    *,
    tied_by_default: bool = False,
    style: NormStyle = RMS_NORM,
    embedding_scale: float | None = None,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
) -> DecoderSpec:
    """The frame around the layers; `layer(index, prefix)` makes each of them.

    Args:
        logit_scale: multiplies the logits. The final norm's weight takes it in.
    """
    architecture = str((config.sequence("architectures") or ("",))[0])
    vocab, hidden = config.integer("vocab_size"), config.integer("hidden_size")
    final_norm = norm(config, "model.norm", style)
    tied = config.flag("tie_word_embeddings", tied_by_default)
    return DecoderSpec(
        family=family,
        architecture=architecture,
        vocab_size=vocab,
        hidden_size=hidden,
        max_position_embeddings=config.integer("max_position_embeddings"),
        embedding=f"{EMBEDDING}.weight",
        layers=tuple(
            layer(index, f"model.layers.{index}")
            for index in range(config.integer("num_hidden_layers"))
        ),
        final_norm=replace(final_norm, multiplier=logit_scale),
        lm_head=LinearSpec(EMBEDDING if tied else "lm_head", hidden, vocab),
        embedding_scale=embedding_scale,
        logit_softcap=logit_softcap,
        bos_token_id=next(iter(config.token_ids("bos_token_id")), None),
        eos_token_ids=config.token_ids("eos_token_id"),
        pad_token_id=next(iter(config.token_ids("pad_token_id")), None),
        ignored_tensors=(
            r".*\.rotary_emb\.inv_freq",
            *((re.escape("lm_head.weight"),) if tied else ()),
        ),
    )
