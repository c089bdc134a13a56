"""What a decoder is, in trtc's own words: a family turns config.json into this, the graph reads it.

Shapes: T tokens, H hidden_size, Hq/Hkv query/KV heads, D head_dim, I intermediate size, E experts.
"""

from dataclasses import dataclass, field
from typing import Literal

from trtc.protos.errors import UnsupportedError

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True)
class LinearSpec:
    """y = x @ weight.T (+ bias): weight [out_features, in_features] as in Transformers."""

    name: str
    """Checkpoint prefix of the tensors: `model.layers.0.self_attn.q_proj`."""
    in_features: int
    out_features: int
    has_bias: bool = False
    rows: tuple[int, int] | None = None
    """Which rows of the checkpoint's tensor, when it is a fused one (Phi-3's qkv_proj)."""


@dataclass(frozen=True)
class NormSpec:
    """RMSNorm; `unit_offset` adds 1 to the weight (Gemma)."""

    weight: str
    eps: float
    unit_offset: bool = False


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding, rotating halves (not interleaved), over the first `rotary_dim` of a head.

    `inv_freq` [rotary_dim / 2] is already scaled (llama3, linear, yarn, longrope);
    `attention_factor` multiplies cos and sin.
    """

    rotary_dim: int
    inv_freq: tuple[float, ...]
    attention_factor: float = 1.0
    short_inv_freq: tuple[float, ...] = ()
    """Longrope: what sequences of up to `short_length` tokens use instead of `inv_freq`."""
    short_length: int | None = None
    """None: all sequences use `inv_freq`."""


@dataclass(frozen=True)
class AttentionSpec:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Multiplies q.k before softcap and softmax."""
    rope: RopeSpec
    q: LinearSpec
    k: LinearSpec
    v: LinearSpec
    o: LinearSpec
    q_norm: NormSpec | None = None
    """Over each head's D values, before rope (Qwen3)."""
    k_norm: NormSpec | None = None
    window: int | None = None
    """A token sees itself and the window-1 tokens before it; None: all."""
    softcap: float | None = None
    """scores = softcap * tanh(scores / softcap)."""


@dataclass(frozen=True)
class DenseMlpSpec:
    gate: LinearSpec
    up: LinearSpec
    down: LinearSpec
    activation: Activation


@dataclass(frozen=True)
class MoeMlpSpec:
    """Routed experts: softmax over router logits, top-k, optionally renormalised."""

    router: LinearSpec
    experts: tuple[DenseMlpSpec, ...]
    top_k: int
    renormalize: bool


@dataclass(frozen=True)
class LayerSpec:
    """x += post(attention(pre(x))); x += post(mlp(pre(x))); post norms are optional (Gemma 2)."""

    attention: AttentionSpec
    mlp: DenseMlpSpec | MoeMlpSpec
    attention_norm: NormSpec
    mlp_norm: NormSpec
    attention_post_norm: NormSpec | None = None
    mlp_post_norm: NormSpec | None = None


@dataclass(frozen=True)
class DecoderSpec:
    """A causal decoder: embedding, layers, final norm, lm_head."""

    family: str
    architecture: str
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    embedding: str
    """Tensor name, [vocab_size, hidden_size]."""
    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec
    lm_head: LinearSpec
    """Names the embedding's prefix when the embeddings are tied."""
    embedding_scale: float | None = None
    logit_softcap: float | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    ignored_tensors: tuple[str, ...] = field(default_factory=tuple)
    """Regular expressions of checkpoint tensors that are known and not needed."""

    @property
    def rope_switch(self) -> int | None:
        """Tokens up to which a sequence uses longrope's short factors; None: one set of factors.

        Raises:
            UnsupportedError: layers switch at different lengths.
        """
        lengths = {layer.attention.rope.short_length for layer in self.layers}
        if len(lengths) > 1:
            raise UnsupportedError(
                "layers switch between rotary factors at different lengths",
                field="config.json: rope_parameters",
            )
        return lengths.pop()

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        """Every linear but the router and the lm_head, in the order of the layers."""
        found: list[LinearSpec] = []
        for layer in self.layers:
            attention = layer.attention
            found += [attention.q, attention.k, attention.v, attention.o]
            mlps = layer.mlp.experts if isinstance(layer.mlp, MoeMlpSpec) else (layer.mlp,)
            for mlp in mlps:
                found += [mlp.gate, mlp.up, mlp.down]
        return tuple(found)
