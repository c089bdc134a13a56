"""DecoderSpec -> the layout of its KV cache.

Layers of one window share a group's pages, and so do layers that attend to all tokens. A page is of
one size for all groups, so every group has as many layers: those of a kind that has more are split
into several groups. Gemma 3 has five window layers to a full one, hence five groups of windows and
one that keeps every token. All layers that keep a state are one group more, as their states lie
side by side in one page.
"""

from collections.abc import Mapping, Sequence

import msgspec

from trtc.builder.spec import (
    AttentionSpec,
    DecoderSpec,
    GatedDeltaSpec,
    LatentAttentionSpec,
    Mamba1Spec,
    Mamba2Spec,
    MixerSpec,
    ShortConvSpec,
)
from trtc.protos.kv import (
    CacheLayout,
    Entry,
    Full,
    Group,
    KvDType,
    State,
    Window,
    attention_entry,
    convolution_entry,
    index_entry,
    latent_entry,
    matrix_entries,
)

PAGE_SIZES = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Tokens of a page that a build may ask for."""
DEFAULT_PAGE_SIZE = 16
_MAX_GROUPS = 8
"""The most page tables of a sequence, each of which every step fills."""


def cache_layout(
    spec: DecoderSpec,
    page_size: int,
    dtype: KvDType,
    *,
    state_dtype: KvDType = "f32",
    window_groups: bool = False,
) -> CacheLayout:
    """The groups of a model's layers, which may differ in heads and head_dim.

    Args:
        state_dtype: of convolutions' columns: that of activations, which they are. The matrices
            of delta nets and of Mamba are f32.
        window_groups: whether the target releases pages that a window has left. Without, or
            where layers have pages of different sizes, all layers keep every token.
    """
    kept = [
        (msgspec.structs.replace(entry, shared_by=_readers(spec, index)), window)
        for index, layer in enumerate(spec.layers)
        for entry, window in _token_entry(index, layer.mixer, dtype)
    ]
    entries = [entry for entry, _ in kept]
    kinds: dict[int | None, list[Entry]] = {None: entries} if entries else {}
    if window_groups and len({entry.num_bytes for entry in entries}) == 1:
        kinds = {}
        for entry, window in kept:
            kinds.setdefault(window, []).append(entry)
    groups = tuple(
        Group(kind=Full() if window is None else Window(tokens=window), entries=tuple(part))
        for window, found in sorted(kinds.items(), key=lambda kind: kind[0] or 0)
        for part in _parts(found, _group_size(kinds))
    )
    return CacheLayout(page_size=page_size, groups=(*groups, *_states(spec, state_dtype)))


def default_page_size(
    spec: DecoderSpec,
    dtype: KvDType,
    *,
    state_dtype: KvDType,
    max_seq_len: int,
    window_groups: bool = False,
) -> int:
    """Tokens of a page where nobody asks for a number.

    Pages are of one size, whatever they hold. Beside the matrices of delta nets and of Mamba, a
    page of few tokens would waste most of its bytes: then it is the first size that has room for a
    sequence's states, as long as sequences may fill one.
    """
    if not spec.keeps_states:
        return DEFAULT_PAGE_SIZE
    for size in PAGE_SIZES[PAGE_SIZES.index(DEFAULT_PAGE_SIZE) :]:
        layout = cache_layout(
            spec, size, dtype, state_dtype=state_dtype, window_groups=window_groups
        )
        if layout.states_have_room or size >= max_seq_len:
            return size
    return PAGE_SIZES[-1]


def _readers(spec: DecoderSpec, index: int) -> tuple[int, ...]:
    """Layers that read the keys and values of layer `index`."""
    return tuple(layer for layer, one in spec.attentions if one.kv_layer == index)


def _token_entry(
    index: int, mixer: MixerSpec | None, dtype: KvDType
) -> tuple[tuple[Entry, int | None], ...]:
    """What a layer keeps of each token, and for how many tokens; (): nothing of its own."""
    if isinstance(mixer, AttentionSpec):
        if mixer.kv_layer is not None:
            return ()
        heads, dim = mixer.num_kv_heads, mixer.head_dim
        entry = attention_entry(index, num_kv_heads=heads, head_dim=dim, dtype=dtype)
        return ((entry, mixer.window),)
    if isinstance(mixer, LatentAttentionSpec):
        entries = [latent_entry(index, width=mixer.width, dtype=dtype)]
        if mixer.indexer is not None:
            entries.append(index_entry(index, width=mixer.indexer.head_dim, dtype=dtype))
        return tuple((entry, None) for entry in entries)
    return ()


def _states(spec: DecoderSpec, dtype: KvDType) -> tuple[Group, ...]:
    """One group of all layers that keep a state."""
    entries = tuple(
        entry
        for index, layer in enumerate(spec.layers)
        for entry in _state_entries(index, layer.mixer, dtype)
    )
    return (Group(kind=State(), entries=entries),) if entries else ()


def _state_entries(index: int, mixer: MixerSpec | None, dtype: KvDType) -> tuple[Entry, ...]:
    """Of one layer; none if it keeps no state."""
    if isinstance(mixer, ShortConvSpec):
        num_columns, width = mixer.taps - 1, mixer.channels
        return (convolution_entry(index, num_columns=num_columns, width=width, dtype=dtype),)
    if isinstance(mixer, GatedDeltaSpec):
        return matrix_entries(
            index,
            num_columns=mixer.taps - 1,
            channels=mixer.channels,
            heads=mixer.num_value_heads,
            key_dim=mixer.key_dim,
            value_dim=mixer.value_dim,
            dtype=dtype,
        )
    if isinstance(mixer, Mamba1Spec):
        return matrix_entries(
            index,
            num_columns=mixer.taps - 1,
            channels=mixer.channels,
            heads=1,
            key_dim=mixer.state_size,
            value_dim=mixer.channels,
            dtype=dtype,
        )
    if isinstance(mixer, Mamba2Spec):
        return matrix_entries(
            index,
            num_columns=mixer.taps - 1,
            channels=mixer.channels,
            heads=mixer.num_heads,
            key_dim=mixer.state_size,
            value_dim=mixer.head_dim,
            dtype=dtype,
        )
    return ()


def _group_size(kinds: Mapping[int | None, Sequence[Entry]]) -> int:
    """Layers of a group: as few as the rarest kind has, unless that makes too many groups."""
    size = min((len(found) for found in kinds.values()), default=1)
    while sum(-(-len(found) // size) for found in kinds.values()) > _MAX_GROUPS:
        size += 1
        if size > max(len(found) for found in kinds.values()):
            break
    return size


def _parts(entries: Sequence[Entry], size: int) -> list[Sequence[Entry]]:
    return [entries[begin : begin + size] for begin in range(0, len(entries), size)]
