"""The layout of a model's KV cache: which layer keeps what of a token, and where.

    group 0  full       layer 5    layer 11
    group 1  window     layer 0    layer 1
    group 2  window     layer 2    layer 3
                        region 0   region 1      a page: one row of every region

The pool is a list of regions, each of `num_pages` rows. A page is the same row of every region. It
belongs to one group at a time and holds `page_size` tokens of that group's layers, so that the
groups share one pool. A sequence has a page table for each group.
"""

from bisect import bisect_right
from typing import Annotated, Literal, NamedTuple

import msgspec

from trtc.protos.dtypes import DTYPES
from trtc.protos.numbers import Count, Index
from trtc.protos.record import Record

KvDType = Literal["f32", "bf16", "f8e4m3"]
PoolShape = tuple[str, int, int, int, int]
"""[num_pages, planes, page_size, heads, width]"""


class Plane(Record, frozen=True):
    """A tensor that a layer keeps: [heads, width] of each token."""

    name: Literal["k", "v"]
    heads: Count
    width: Count
    dtype: KvDType

    @property
    def token_bytes(self) -> int:
        return DTYPES[self.dtype].num_bytes(self.heads * self.width)


class Entry(Record, frozen=True):
    """What a layer writes, and which other layers read it in place of one of their own."""

    layer: Index
    planes: Annotated[tuple[Plane, ...], msgspec.Meta(min_length=1)]
    shared_by: tuple[Index, ...] = ()

    def __post_init__(self) -> None:
        if len({(one.heads, one.width, one.dtype) for one in self.planes}) > 1:
            raise ValueError(f"the planes of layer {self.layer} differ")

    @property
    def token_bytes(self) -> int:
        return sum(plane.token_bytes for plane in self.planes)

    @property
    def dtype(self) -> KvDType:
        return self.planes[0].dtype


class Full(Record, frozen=True, tag="full"):
    """Every token of the context stays."""


class Window(Record, frozen=True, tag="window"):
    """A token attends to itself and the `tokens` - 1 before it. Older ones need not stay."""

    tokens: Count


class Group(Record, frozen=True):
    """Layers whose pages are allocated and let go together."""

    kind: Full | Window
    entries: Annotated[tuple[Entry, ...], msgspec.Meta(min_length=1)]
    """Entry number i lies in region i."""


class Place(NamedTuple):
    """Where an entry is."""

    group: int
    region: int
    entry: Entry

    @property
    def name(self) -> str:
        """Of the pool in the graph; the graph's output adds `_out`."""
        return f"kv_{self.entry.layer}"


class CacheLayout(Record, frozen=True):
    """See the module."""

    page_size: Count
    """Tokens of a page."""
    groups: tuple[Group, ...]

    def __post_init__(self) -> None:
        layers = [layer for one in self.places for layer in (one.entry.layer, *one.entry.shared_by)]
        if len(set(layers)) < len(layers):
            raise ValueError("a layer has two entries")
        for one in self.places:
            if one.entry.token_bytes * self.page_size != self.region_bytes[one.region]:
                raise ValueError(f"entries of region {one.region} have pages of different sizes")

    @property
    def places(self) -> tuple[Place, ...]:
        """Every entry, in the order of the layers that write them."""
        found = (
            Place(number, region, entry)
            for number, group in enumerate(self.groups)
            for region, entry in enumerate(group.entries)
        )
        return tuple(sorted(found, key=lambda place: place.entry.layer))

    @property
    def region_bytes(self) -> tuple[int, ...]:
        """Bytes of a page in each region."""
        longest = max(self.groups, key=lambda group: len(group.entries), default=None)
        entries = longest.entries if longest else ()
        return tuple(entry.token_bytes * self.page_size for entry in entries)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in all regions."""
        return sum(self.region_bytes)

    def pool_shape(self, entry: Entry) -> PoolShape:
        """Of an entry's region, as the entry's layers see it."""
        plane = entry.planes[0]
        return ("num_pages", len(entry.planes), self.page_size, plane.heads, plane.width)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of each group, the tokens that attention looks back to; None: all."""
        return tuple(
            group.kind.tokens if isinstance(group.kind, Window) else None for group in self.groups
        )

    def pages_for(self, num_tokens: int) -> int:
        """Pages of one group that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def pages_of_sequence(self, num_tokens: int) -> int:
        """Pages of all groups that a sequence of `num_tokens` tokens holds while it decodes."""
        return sum(held_pages(num_tokens, self.page_size, window) for window in self.windows)

    def longest_sequence(self, num_pages: int, limit: int) -> int:
        """Tokens, at most `limit`, of the longest sequence that such a pool holds alone."""
        return bisect_right(range(limit + 1), num_pages, key=self.pages_of_sequence) - 1

    def of_rank(self, ranks: int) -> "CacheLayout":
        """Of one of `ranks` ranks, each with as many heads of every plane."""
        replace = msgspec.structs.replace

        def share(entry: Entry) -> Entry:
            planes = tuple(replace(one, heads=one.heads // ranks) for one in entry.planes)
            return replace(entry, planes=planes)

        groups = (
            replace(group, entries=tuple(share(entry) for entry in group.entries))
            for group in self.groups
        )
        return replace(self, groups=tuple(groups))


def held_pages(num_tokens: int, page_size: int, window: int | None) -> int:
    """Pages that a group holds of a sequence of `num_tokens` tokens while it decodes.

    A window may begin and end within a page, the page before it stays (KvPool.num_outside), and so
    does what a window has left until the step that left it is complete.
    """
    every = -(-num_tokens // page_size)
    return every if window is None else min(every, -(-window // page_size) + 3)


def attention_entry(layer: int, *, num_kv_heads: int, head_dim: int, dtype: KvDType) -> Entry:
    """What attention keeps: a key and a value for each KV head."""
    keys = Plane(name="k", heads=num_kv_heads, width=head_dim, dtype=dtype)
    return Entry(layer=layer, planes=(keys, msgspec.structs.replace(keys, name="v")))


def uniform_layout(
    *, num_layers: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: KvDType
) -> CacheLayout:
    """One group of alike layers that keep every token."""
    entries = tuple(
        attention_entry(layer, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype)
        for layer in range(num_layers)
    )
    groups = (Group(kind=Full(), entries=entries),) if entries else ()
    return CacheLayout(page_size=page_size, groups=groups)
