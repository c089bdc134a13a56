"""DecoderSpec -> the layout of its KV cache.

Layers of one window share a group's pages, and so do layers that attend to all tokens. A page is of
one size for all groups, so every group has as many layers: those of a kind that has more are split
into several groups. Gemma 3 has five window layers to a full one, hence five groups of windows and
one that keeps every token.
"""

from collections.abc import Mapping, Sequence

from trtc.builder.spec import DecoderSpec
from trtc.protos.kv import CacheLayout, Entry, Full, Group, KvDType, Window, attention_entry

_MAX_GROUPS = 8
"""Page tables of a sequence, which every step is built from."""


def cache_layout(
    spec: DecoderSpec, page_size: int, dtype: KvDType, *, window_groups: bool = False
) -> CacheLayout:
    """The groups of a model's layers, which may differ in heads and head_dim.

    Args:
        window_groups: whether the target lets go of pages that a window has left. Without, or
            where layers have pages of different sizes, all layers keep every token.
    """
    entries = [
        attention_entry(
            index,
            num_kv_heads=layer.attention.num_kv_heads,
            head_dim=layer.attention.head_dim,
            dtype=dtype,
        )
        for index, layer in enumerate(spec.layers)
    ]
    kinds: dict[int | None, list[Entry]] = {None: entries}
    if window_groups and len({entry.token_bytes for entry in entries}) == 1:
        kinds = {}
        for entry, layer in zip(entries, spec.layers, strict=True):
            kinds.setdefault(layer.attention.window, []).append(entry)
    groups = tuple(
        Group(kind=Full() if window is None else Window(tokens=window), entries=tuple(part))
        for window, found in sorted(kinds.items(), key=lambda kind: kind[0] or 0)
        for part in _parts(found, _group_size(kinds))
    )
    return CacheLayout(page_size=page_size, groups=groups)


def _group_size(kinds: Mapping[int | None, Sequence[Entry]]) -> int:
    """Layers of a group: as few as the rarest kind has, unless that makes too many groups."""
    size = min(len(found) for found in kinds.values())
    while sum(-(-len(found) // size) for found in kinds.values()) > _MAX_GROUPS:
        size += 1
        if size > max(len(found) for found in kinds.values()):
            break
    return size


def _parts(entries: Sequence[Entry], size: int) -> list[Sequence[Entry]]:
    return [entries[begin : begin + size] for begin in range(0, len(entries), size)]
