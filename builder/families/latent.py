"""Multi-head latent attention (MLA) by the names that DeepSeek's checkpoints gave it."""

import math

from trtc.builder.families.bounds import LATENT_MULTIPLE
from trtc.builder.families.config import Config
from trtc.builder.families.rope import rope_parameters, rope_spec
from trtc.builder.spec import (
    Interleaved,
    LatentAttentionSpec,
    LinearSpec,
    NormSpec,
    QueryScale,
    RopeSpec,
)
from trtc.protos.errors import UnsupportedError

_EPS = 1e-6
"""Of the norms inside attention, which do not read rms_norm_eps."""


def latent_rope(config: Config, max_seq_len: int) -> RopeSpec:
    """The rotary embedding, which turns all of a query's last `qk_rope_head_dim` dimensions.

    Raises:
        UnsupportedError, CheckpointError: as `rope_spec`.
    """
    given = rope_parameters(config)
    dim = config.integer("qk_rope_head_dim")
    # Mistral 4 counts these dimensions as a part of the head; here they are the whole.
    part = dim / (config.integer("qk_nope_head_dim") + dim)
    Config(given).require("partial_rotary_factor", (1.0, part), 1.0)
    whole = {**given, "partial_rotary_factor": 1.0}
    fields = {**config.fields, "rope_scaling": None, "partial_rotary_factor": 1.0}
    return rope_spec(Config({**fields, "rope_parameters": whole}), dim, max_seq_len)


def latent_attention(
    config: Config, layer: str, rope: RopeSpec, query_scale: QueryScale | None = None
) -> LatentAttentionSpec:
    """`<layer>.self_attn`, with queries by way of a latent of their own where `q_lora_rank` is.

    Raises:
        CheckpointError: a size is missing or wrong.
        UnsupportedError: kernels do not take the latent's size.
    """
    heads, hidden = config.integer("num_attention_heads"), config.integer("hidden_size")
    nope, rotary = config.integer("qk_nope_head_dim"), config.integer("qk_rope_head_dim")
    value, rank = config.integer("v_head_dim"), config.integer("kv_lora_rank")
    q_rank = config.optional_integer("q_lora_rank")
    if (rank + rotary) % LATENT_MULTIPLE:
        raise UnsupportedError(
            f"{rank} and qk_rope_head_dim {rotary} make {rank + rotary} cached elements of a "
            f"token, no multiple of {LATENT_MULTIPLE}",
            field="config.json: kv_lora_rank",
        )
    bias = config.flag("attention_bias", False)
    interleaved = config.flag("rope_interleave", True)
    prefix = f"{layer}.self_attn"

    def pairs(plain: int) -> Interleaved | None:
        """Of a vector whose last dimensions turn."""
        return Interleaved(plain + rotary, rotary, plain) if interleaved else None

    def inner_norm(name: str) -> NormSpec:
        return NormSpec(f"{prefix}.{name}.weight", _EPS)

    return LatentAttentionSpec(
        num_heads=heads,
        nope_dim=nope,
        rope_dim=rotary,
        value_dim=value,
        rank=rank,
        scale=(nope + rotary) ** -0.5 * _yarn_scale(config),
        rope=rope,
        q=LinearSpec(
            f"{prefix}.{'q_b_proj' if q_rank else 'q_proj'}",
            q_rank or hidden,
            heads * (nope + rotary),
            interleaved=pairs(nope),
        ),
        kv_a=LinearSpec(
            f"{prefix}.kv_a_proj_with_mqa", hidden, rank + rotary, bias, interleaved=pairs(rank)
        ),
        kv_b=LinearSpec(f"{prefix}.kv_b_proj", rank, heads * (nope + value)),
        kv_norm=inner_norm("kv_a_layernorm"),
        o=LinearSpec(f"{prefix}.o_proj", heads * value, hidden, bias),
        q_a=LinearSpec(f"{prefix}.q_a_proj", hidden, q_rank, bias) if q_rank else None,
        q_norm=inner_norm("q_a_layernorm") if q_rank else None,
        query_scale=query_scale,
    )


def _yarn_scale(config: Config) -> float:
    """What multiplies the scores' scale where YaRN has an `mscale_all_dim`: its square."""
    parameters = Config(rope_parameters(config))
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    by = parameters.optional_number("mscale_all_dim")
    if kind == "default" or not by:
        return 1.0
    factor = parameters.number("factor")
    return 1.0 if factor <= 1 else (0.1 * by * math.log(factor) + 1.0) ** 2
