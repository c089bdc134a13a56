"""Sizes of gated delta nets, as several families spell them."""

from trtc.builder.families.config import Config
from trtc.protos.errors import CheckpointError


def widths(config: Config) -> tuple[int, int]:
    """Of all keys and of all values of a token.

    Raises:
        CheckpointError: heads of values do not share heads of keys equally.
    """
    key_heads = config.integer("linear_num_key_heads")
    heads = config.integer("linear_num_value_heads")
    if heads % key_heads:
        raise CheckpointError(
            f"{key_heads} does not divide linear_num_value_heads {heads}",
            field="config.json: linear_num_key_heads",
        )
    keys = key_heads * config.integer("linear_key_head_dim")
    return keys, heads * config.integer("linear_value_head_dim")
