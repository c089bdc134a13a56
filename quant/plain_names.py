"""Names of modules and tensors, without what differs between checkpoints and Transformers."""

import re

_HUB_NAMES = ((re.compile(r"^.*?(?=layers\.)"), ""), (re.compile(r"\.block_sparse_moe\."), ".mlp."))


def plain_name(name: str) -> str:
    """`layers.0.mlp.down_proj` of a name in either."""
    for pattern, instead in _HUB_NAMES:
        name = pattern.sub(instead, name)
    return name
