"""Parts that several families share, by the tensor names that Transformers saves."""

import re
from collections.abc import Callable, Mapping

from trtc.builder.families.config import Config, shown
from trtc.builder.spec import (
    Activation,
    AttentionSpec,
    DecoderSpec,
    DenseMlpSpec,
    LayerSpec,
    LinearSpec,
    MoeMlpSpec,
    NormSpec,
    RopeSpec,
)
from trtc.protos.errors import CheckpointError, UnsupportedError

EMBEDDING = "model.embed_tokens"
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
    """The MLP's activation.

    Raises:
        UnsupportedError: one that trtc does not have.
    """
    return ACTIVATIONS[config.require(key, tuple(ACTIVATIONS), default)]


def norm(config: Config, name: str, *, unit_offset: bool = False) -> NormSpec:
    return NormSpec(f"{name}.weight", config.number("rms_norm_eps", 1e-6), unit_offset)


def attention(
    config: Config,
    layer: str,
    rope: RopeSpec,
    *,
    dim: int,
    qkv_bias: bool = False,
    o_bias: bool = False,
    qk_norm: bool = False,
    window: int | None = None,
) -> AttentionSpec:
    """Separate q, k, v and o projections under `<layer>.self_attn`."""
    heads = config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", heads)
    hidden = config.integer("hidden_size")
    prefix = f"{layer}.self_attn"
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        scale=dim**-0.5,
        rope=rope,
        q=LinearSpec(f"{prefix}.q_proj", hidden, heads * dim, qkv_bias),
        k=LinearSpec(f"{prefix}.k_proj", hidden, kv_heads * dim, qkv_bias),
        v=LinearSpec(f"{prefix}.v_proj", hidden, kv_heads * dim, qkv_bias),
        o=LinearSpec(f"{prefix}.o_proj", heads * dim, hidden, o_bias),
        q_norm=norm(config, f"{prefix}.q_norm") if qk_norm else None,
        k_norm=norm(config, f"{prefix}.k_norm") if qk_norm else None,
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


def pre_norm_layer(
    config: Config, layer: str, attention_spec: AttentionSpec, mlp: DenseMlpSpec | MoeMlpSpec
) -> LayerSpec:
    """Norms before attention and MLP only, as in Llama."""
    return LayerSpec(
        mixer=attention_spec,
        mlp=mlp,
        attention_norm=norm(config, f"{layer}.input_layernorm"),
        mlp_norm=norm(config, f"{layer}.post_attention_layernorm"),
    )


def window_by_layer_type(config: Config, index: int, default_type: str) -> int | None:
    """The window of layer `index`: `layer_types` decides, else the family's rule.

    Raises:
        UnsupportedError: a layer type that trtc does not have.
        CheckpointError: `layer_types` or `sliding_window` do not fit.
    """
    kinds = config.sequence("layer_types")
    if kinds is not None and len(kinds) < config.integer("num_hidden_layers"):
        raise CheckpointError(
            f"names {len(kinds)} layers of {config.integer('num_hidden_layers')}",
            field="config.json: layer_types",
        )
    kind = default_type if kinds is None else kinds[index]
    if kind == "full_attention":
        return None
    if kind == "sliding_attention":
        return config.integer("sliding_window")
    raise UnsupportedError(
        f"layer type {shown(kind)} is not supported",
        field="config.json: layer_types",
        remedy="trtc knows full_attention and sliding_attention",
    )


def decoder(
    config: Config,
    family: str,
    layer: Callable[[int, str], LayerSpec],
    *,
    tied_by_default: bool = False,
    unit_offset: bool = False,
    embedding_scale: float | None = None,
    logit_softcap: float | None = None,
) -> DecoderSpec:
    """The frame around the layers; `layer(index, prefix)` makes each of them."""
    architecture = str((config.sequence("architectures") or ("",))[0])
    vocab, hidden = config.integer("vocab_size"), config.integer("hidden_size")
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
        final_norm=norm(config, "model.norm", unit_offset=unit_offset),
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
