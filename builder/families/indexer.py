"""The indexer of DeepSeek Sparse Attention by the names of its checkpoints."""

from trtc.builder.families.bounds import LATENT_MULTIPLE
from trtc.builder.families.config import Config
from trtc.builder.spec import IndexerSpec, Interleaved, LinearSpec, NormSpec
from trtc.protos.errors import UnsupportedError

_EPS = 1e-6
"""Of the keys' norm, which does not read rms_norm_eps."""


def indexer(config: Config, layer: str, max_seq_len: int, *, interleaved: bool) -> IndexerSpec:
    """`<layer>.self_attn.indexer`.

    Args:
        interleaved: whether rope turns pairs of neighbours of a head, not those of halves.

    Raises:
        CheckpointError: a size is missing or wrong.
        UnsupportedError: kernels do not take a head's size; pairs of other dimensions turn.
    """
    config.require("indexer_rope_interleave", (interleaved,), interleaved)
    heads, dim = config.integer("index_n_heads"), config.integer("index_head_dim")
    rotary, hidden = config.integer("qk_rope_head_dim"), config.integer("hidden_size")
    if dim % LATENT_MULTIPLE or dim < rotary:
        raise UnsupportedError(
            f"is {dim}, no multiple of {LATENT_MULTIPLE} or less than qk_rope_head_dim {rotary}",
            field="config.json: index_head_dim",
        )
    prefix = f"{layer}.self_attn.indexer"
    pairs = Interleaved(dim, rotary) if interleaved else None
    rank = config.integer("q_lora_rank")
    return IndexerSpec(
        num_heads=heads,
        head_dim=dim,
        top_k=min(config.integer("index_topk"), max_seq_len),
        q=LinearSpec(f"{prefix}.wq_b", rank, heads * dim, interleaved=pairs),
        k=LinearSpec(f"{prefix}.wk", hidden, dim, interleaved=pairs),
        k_norm=NormSpec(
            f"{prefix}.k_norm.weight",
            _EPS,
            centered=True,
            bias=f"{prefix}.k_norm.bias",
            interleaved=pairs,
        ),
        weights=LinearSpec(f"{prefix}.weights_proj", hidden, heads),
    )
