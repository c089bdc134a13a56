"""Fuses per-head norms, rotary embedding and the KV write into one pass over q, k and v; of layers
that read another layer's cache, norm and rotary embedding of q."""

from dataclasses import dataclass, replace

from trtc.builder.passes.base import Rewrite
from trtc.builder.passes.matching import (
    Node,
    Tensor,
    dtype_of,
    input_of,
    is_fused,
    is_weight,
    producer,
    site_of,
)
from trtc.builder.passes.rewriter import Rewriter

_RESHAPING = ("Reshape", "Unsqueeze", "Squeeze")
_NEUTRAL = (*_RESHAPING, "Cast")
"""Operators that keep the elements and their order (and the value, of f32 to bf16 and back)."""


@dataclass(frozen=True)
class _Rotated:
    """q or k before its norm and its rotation, and what they are made with."""

    source: Tensor
    positions: Tensor
    cos: Tensor
    sin: Tensor
    num_heads: int
    rotary_dim: int
    norm: Tensor | None = None
    eps: float = 0.0
    norm_after: bool = False


@dataclass(frozen=True)
class _Values:
    """v before its norm."""

    source: Tensor
    norm: Tensor | None = None
    eps: float = 0.0


@dataclass(frozen=True)
class _Scale:
    """What multiplies rotated queries: table[positions]."""

    table: Tensor
    positions: Tensor


def fuse_rope_kv_write(rewriter: Rewriter) -> bool:
    """Fuse each layer's q/k/v norm, rope and KV write.

    Rule: with r(x) = RotaryEmbedding(x), RotaryEmbedding(RMSNormalization(x)) or
    RMSNormalization(RotaryEmbedding(x)), and n(x) = x or RMSNormalization(x), between any reshapes
    and casts,
        kv_write(r(k), n(v), pool, slots), paged_attention(r(q), pool_out, ...)
        -> rope_kv_write(q, k, v, positions, slots, ..., pool), paged_attention(q_out, pool_out)
    where both rotations share positions, tables and the place of the norm, norms have one epsilon,
    and no result is read elsewhere. r(q) may be multiplied by Gather(q_scale, positions).

    Of several attentions that read pool_out the first one is of the layer that wrote it. Of others:
        paged_attention(r(q), pool_out, ...) -> paged_attention(rope(q, positions, ...), pool_out)
    """
    changed = False
    for write in rewriter.fused_nodes("kv_write"):
        readers = list(write.outputs[0].outputs)
        if not readers or not all(is_fused(one, "paged_attention") for one in readers):
            continue
        attention = readers[0]
        queries, scale = _match_scale(rewriter, attention.inputs[0])
        q = _match_rotated(rewriter, queries, attention.attrs["head_dim"])
        k = _match_rotated(rewriter, write.inputs[0], write.attrs["head_dim"])
        v = _match_values(rewriter, write.inputs[1], write.attrs["head_dim"])
        if q is None or k is None or not _share_tables(q, k) or not _share_epsilon(q, k, v):
            continue
        if scale is None or scale.positions is q.positions:
            table = None if scale is None else rewriter.as_type(scale.table, "f32")
            _fuse(rewriter, write, attention, q, k, v, table)
            changed = True
    for attention in rewriter.fused_nodes("paged_attention"):
        if attention.inputs[1].outputs[0] is attention:
            continue
        q = _match_rotated(rewriter, attention.inputs[0], attention.attrs["head_dim"])
        if q is not None:
            _fuse_queries(rewriter, attention, q)
            changed = True
    return changed


def _match_values(rewriter: Rewriter, tensor: Tensor, head_dim: int) -> _Values:
    norm = _producer_through(rewriter, tensor, "RMSNormalization")
    if norm is None or not _is_head_norm(norm, head_dim):
        return _Values(_source(rewriter, tensor))
    weight = rewriter.as_type(norm.inputs[1], "f32")
    return _Values(_source(rewriter, norm.inputs[0]), weight, _epsilon(norm))


def _match_scale(rewriter: Rewriter, tensor: Tensor) -> tuple[Tensor, _Scale | None]:
    """What a table of factors by position multiplies, and the table; `tensor` itself if none
    does."""
    multiply = producer(tensor, "Mul")
    if multiply is None or rewriter.sole_consumer(tensor) is None:
        return tensor, None
    for x, factors in (multiply.inputs, multiply.inputs[::-1]):
        gather = _producer_through(rewriter, factors, "Gather")
        if gather is not None and is_weight(gather.inputs[0]) and len(gather.inputs[0].shape) == 1:
            return x, _Scale(gather.inputs[0], _source(rewriter, gather.inputs[1]))
    return tensor, None


def _match_rotated(rewriter: Rewriter, tensor: Tensor, head_dim: int) -> _Rotated | None:
    after = _producer_through(rewriter, tensor, "RMSNormalization")
    if after is not None and _is_head_norm(after, head_dim):
        before = _match_rope(rewriter, after.inputs[0], head_dim)
        if before is None or before.norm is not None:
            return None
        weight = rewriter.as_type(after.inputs[1], "f32")
        return replace(before, norm=weight, eps=_epsilon(after), norm_after=True)
    return _match_rope(rewriter, tensor, head_dim)


def _match_rope(rewriter: Rewriter, tensor: Tensor, head_dim: int) -> _Rotated | None:
    rope = _producer_through(rewriter, tensor, "RotaryEmbedding")
    if rope is None or len(rope.inputs) < 4 or rope.attrs.get("interleaved", 0):
        return None
    x, cos, sin, position_ids = rope.inputs
    num_heads = rope.attrs.get("num_heads", 0)
    if len(x.shape) != 3 or not num_heads or not is_weight(cos) or not is_weight(sin):
        return None
    norm = _producer_through(rewriter, x, "RMSNormalization")
    if norm is not None and not _is_head_norm(norm, head_dim):
        # A norm over all heads of a row (OLMo 2): the rotation reads its result.
        norm = None
    source = _source(rewriter, norm.inputs[0] if norm is not None else x)
    if len(source.shape) != 2 or source.shape[1] != num_heads * head_dim:
        return None
    return _Rotated(
        source=source,
        positions=_source(rewriter, position_ids),
        cos=cos,
        sin=sin,
        num_heads=num_heads,
        rotary_dim=rope.attrs.get("rotary_embedding_dim", 0) or head_dim,
        norm=rewriter.as_type(norm.inputs[1], "f32") if norm is not None else None,
        eps=_epsilon(norm) if norm is not None else 0.0,
    )


def _epsilon(norm: Node) -> float:
    return float(norm.attrs.get("epsilon", 1e-5))


def _is_head_norm(norm: Node, head_dim: int) -> bool:
    return is_weight(norm.inputs[1]) and list(norm.inputs[1].shape) == [head_dim]


def _producer_through(rewriter: Rewriter, tensor: Tensor, op: str) -> Node | None:
    """The `op` that computes `tensor`, through reshapes and casts without another reader."""
    node = producer(tensor)
    while node is not None and node.op in _NEUTRAL and rewriter.sole_consumer(tensor) is not None:
        tensor = node.inputs[0]
        node = producer(tensor)
    if rewriter.sole_consumer(tensor) is None:
        return None
    return producer(tensor, op)


def _source(rewriter: Rewriter, tensor: Tensor) -> Tensor:
    """What `tensor` is a reshape or cast of."""
    node = producer(tensor)
    while node is not None and node.op in _NEUTRAL:
        tensor = node.inputs[0]
        node = producer(tensor)
    return tensor


def _share_tables(q: _Rotated, k: _Rotated) -> bool:
    return (
        q.positions is k.positions
        and q.cos is k.cos
        and q.sin is k.sin
        and q.rotary_dim == k.rotary_dim
        and q.norm_after == k.norm_after
        and dtype_of(q.source) == dtype_of(k.source)
    )


def _share_epsilon(*parts: _Rotated | _Values) -> bool:
    return len({part.eps for part in parts if part.norm is not None}) <= 1


def _fuse(
    rewriter: Rewriter,
    write: Node,
    attention: Node,
    q: _Rotated,
    k: _Rotated,
    v: _Values,
    q_scale: Tensor | None,
) -> None:
    pool_out = write.outputs[0]
    q_out = rewriter.variable(f"{write.name}.q", dtype_of(q.source), q.source.shape)
    rewriter.fused(
        "rope_kv_write",
        f"{site_of(write)}.rope_kv_write",
        inputs={
            "q": q.source,
            "k": k.source,
            "v": v.source,
            "positions": q.positions,
            "slots": input_of(write, "slots"),
            "cos": q.cos,
            "sin": q.sin,
            "q_norm": q.norm,
            "k_norm": k.norm,
            "v_norm": v.norm,
            "q_scale": q_scale,
            "k_scale": input_of(write, "k_scale"),
            "v_scale": input_of(write, "v_scale"),
            "pool": input_of(write, "pool"),
        },
        outputs={"q_out": q_out, "pool_out": pool_out},
        attributes={
            "num_heads": q.num_heads,
            "num_kv_heads": write.attrs["num_kv_heads"],
            "head_dim": write.attrs["head_dim"],
            "rotary_dim": q.rotary_dim,
            "eps": q.eps or k.eps or v.eps,
            "norm_after": int(q.norm_after),
        },
    )
    rewriter.set_input(attention, "q", q_out)


def _fuse_queries(rewriter: Rewriter, attention: Node, q: _Rotated) -> None:
    q_out = rewriter.variable(f"{attention.name}.q", dtype_of(q.source), q.source.shape)
    rewriter.fused(
        "rope",
        f"{site_of(attention)}.rope",
        inputs={
            "q": q.source,
            "positions": q.positions,
            "cos": q.cos,
            "sin": q.sin,
            "q_norm": q.norm,
        },
        outputs={"out": q_out},
        attributes={
            "num_heads": q.num_heads,
            "head_dim": attention.attrs["head_dim"],
            "rotary_dim": q.rotary_dim,
            "eps": q.eps,
            "norm_after": int(q.norm_after),
        },
    )
    rewriter.set_input(attention, "q", q_out)


FUSE_ROPE_KV_WRITE = Rewrite("fuse_rope_kv_write", fuse_rope_kv_write)
