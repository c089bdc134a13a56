"""The layout of a model's KV cache: groups, the planes of their layers, and regions.

    group 0  full       layer 5    layer 11
    group 1  window     layer 0    layer 1
    group 2  window     layer 2    layer 3
                        region 0   region 1      a page: one row of every region

The pool is a list of regions, each of `num_pages` rows. A page is the same row of every region. It
belongs to one group at a time and holds `page_size` tokens of that group's layers, so that the
groups share one pool. A sequence has a page table for each group.

A page of a state group holds one state instead: that of its layers after all tokens up to some
position. Page i of a sequence's table has the state after its tokens of page i. A sequence
needs only the last one; those before it are snapshots at page boundaries, for shared prefixes.
While drafts are verified, each row writes its state to a page of its own. States are small, and
those of several layers are adjacent in a region.
"""

from bisect import bisect_right
from collections.abc import Mapping
from typing import Annotated, Literal, NamedTuple

import msgspec

from trtc.protos.dtypes import DTYPES, DTypeName
from trtc.protos.errors import InvariantError
from trtc.protos.numbers import Count, Index
from trtc.protos.record import Record

KvDType = Literal["f32", "bf16", "f8e4m3", "i8", "i4"]
PoolShape = tuple[str, int, int, int, int] | tuple[str, int, int]
"""[num_pages, planes, page_size, heads, width], or of a state [num_pages, columns, width]"""
SCALE_BYTES: Mapping[KvDType, int] = {"i8": 4, "i4": 4}
"""Of the f32 scale that each token and head has in planes of a type; 0: none."""
_PACKED: Mapping[KvDType, DTypeName] = {"i4": "u8"}
"""What holds the elements of a type of which a byte has two."""
_BESIDE_OTHERS = ("index", "matrix")
"""Planes of a layer that has another entry, too."""
_ALIGNMENT = 64
"""Alignment of states in bytes, for wide loads."""


class Plane(Record, frozen=True):
    """A tensor of a layer's cache: [heads, width] for each token, or for each state."""

    name: Literal["k", "v", "latent", "index", "columns", "matrix"]
    """index: the key by which attention's tokens are selected.
    columns: the last inputs of a convolution. matrix: the recurrent state of a delta net or of
    Mamba."""
    heads: Count
    """For a convolution's state: the number of its columns."""
    width: Count
    dtype: KvDType
    """With scales, a plane of a page has the codes of all its tokens, [page_size, heads, width],
    and their scales behind them, [page_size, heads] f32."""

    def __post_init__(self) -> None:
        if self.dtype in SCALE_BYTES and self.name not in ("k", "v"):
            raise ValueError(f"a plane {self.name} has no {self.dtype}")
        if self.width * DTYPES[self.dtype].bits % 8:
            raise ValueError(f"{self.width} elements of {self.dtype} are not whole bytes")

    @property
    def element(self) -> DTypeName:
        """Type of the pool's elements: `dtype`, or bytes that hold several."""
        return _PACKED.get(self.dtype, self.dtype)

    @property
    def stored_width(self) -> int:
        """Elements of the pool that a head of a token takes, its scale included."""
        bits = self.width * DTYPES[self.dtype].bits + SCALE_BYTES.get(self.dtype, 0) * 8
        return bits // DTYPES[self.element].bits

    @property
    def num_bytes(self) -> int:
        return DTYPES[self.element].num_bytes(self.heads * self.stored_width)


class Entry(Record, frozen=True):
    """The cache of a layer, and the other layers that read it instead of one of their own.

    A layer with planes or states of several shapes has an entry for each: a recurrence has the
    columns of its convolution and a matrix, a sparse attention its latents and index keys.
    """

    layer: Index
    planes: Annotated[tuple[Plane, ...], msgspec.Meta(min_length=1)]
    shared_by: tuple[Index, ...] = ()

    def __post_init__(self) -> None:
        if len({(one.heads, one.width, one.dtype) for one in self.planes}) > 1:
            raise ValueError(f"the planes of layer {self.layer} differ")

    @property
    def num_bytes(self) -> int:
        """Bytes per token, or per state."""
        return sum(plane.num_bytes for plane in self.planes)

    @property
    def element(self) -> DTypeName:
        """Type of the pool's elements."""
        return self.planes[0].element


class Full(Record, frozen=True, tag="full"):
    """Every token of the context is kept."""


class Window(Record, frozen=True, tag="window"):
    """A token attends to itself and the `tokens` - 1 before it. Older ones need not be kept."""

    tokens: Count


class State(Record, frozen=True, tag="state"):
    """A fixed number of bytes, however long the sequence is: the last inputs of a convolution, or
    the matrix of a delta net or of Mamba."""


class Group(Record, frozen=True):
    """Layers whose pages are allocated and released together."""

    kind: Full | Window | State
    entries: Annotated[tuple[Entry, ...], msgspec.Meta(min_length=1)]
    """Entry i is in region i; states are adjacent."""

    @property
    def is_state(self) -> bool:
        return isinstance(self.kind, State)


class Place(NamedTuple):
    """The place of an entry in the pool."""

    group: int
    region: int
    entry: Entry
    offset: int = 0
    """Byte offset of a state in a page's row of the region."""

    @property
    def name(self) -> str:
        """Name of the pool in the graph; the graph's output adds `_out`."""
        plane = self.entry.planes[0].name
        name = f"kv_{self.entry.layer}"
        return f"{name}_{plane}" if plane in _BESIDE_OTHERS else name


class CacheLayout(Record, frozen=True):
    """The groups of a model's cache, and the regions of the pool that they share."""

    page_size: Count
    """Tokens of a page."""
    groups: Annotated[tuple[Group, ...], msgspec.Meta(min_length=1)]

    def __post_init__(self) -> None:
        entries = [
            (layer, one.entry.planes[0].name)
            for one in self.places
            for layer in (one.entry.layer, *one.entry.shared_by)
        ]
        if len(set(entries)) < len(entries):
            raise ValueError("a layer has two entries of one kind")
        regions = self._token_regions
        for group in self._token_groups:
            for region, entry in enumerate(group.entries):
                if entry.num_bytes * self.page_size != regions[region]:
                    raise ValueError(f"entries of region {region} have pages of different sizes")
        if sum(group.is_state for group in self.groups) > 1:
            raise ValueError("there is more than one group of states")

    @property
    def places(self) -> tuple[Place, ...]:
        """Every entry, in the order of the layers that write them."""
        found = (
            place
            for number, group in enumerate(self.groups)
            for place in (
                self._state_places(number)
                if group.is_state
                else [Place(number, region, entry) for region, entry in enumerate(group.entries)]
            )
        )
        return tuple(sorted(found, key=lambda place: place.entry.layer))

    @property
    def region_bytes(self) -> tuple[int, ...]:
        """Bytes of a page in each region."""
        regions = self._token_regions
        return regions + tuple(
            _aligned(place.entry.num_bytes)
            for number, group in enumerate(self.groups)
            if group.is_state
            for place in self._state_places(number)
            if place.region >= len(regions)
        )

    @property
    def states_have_room(self) -> bool:
        """Whether a page that holds tokens is large enough for a sequence's states, too."""
        return len(self.region_bytes) == len(self._token_regions)

    @property
    def _token_groups(self) -> tuple[Group, ...]:
        return tuple(group for group in self.groups if not group.is_state)

    @property
    def _token_regions(self) -> tuple[int, ...]:
        """Bytes of a page in each region that holds tokens."""
        longest = max(self._token_groups, key=lambda group: len(group.entries), default=None)
        entries = longest.entries if longest else ()
        return tuple(entry.num_bytes * self.page_size for entry in entries)

    def _state_places(self, number: int) -> list[Place]:
        """Places states one after another in the regions of tokens; one that fits none of them gets
        a region of its own."""
        regions = self._token_regions
        found: list[Place] = []
        region = offset = 0
        for entry in self.groups[number].entries:
            size = _aligned(entry.num_bytes)
            while region < len(regions) and offset + size > regions[region]:
                region, offset = region + 1, 0
            found.append(Place(number, region, entry, offset))
            if region < len(regions):
                offset += size
            else:
                region += 1
        return found

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in all regions."""
        return sum(self.region_bytes)

    def pool_shape(self, place: Place) -> PoolShape:
        """Shape of an entry's part of its region, for the entry's layers."""
        planes = place.entry.planes
        if self.groups[place.group].is_state:
            return ("num_pages", planes[0].heads, planes[0].width)
        return ("num_pages", len(planes), self.page_size, planes[0].heads, planes[0].stored_width)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """For each group, the number of tokens that a token attends to, itself included; None: all.
        0: a state group."""
        return tuple(_window(group.kind) for group in self.groups)

    def pages_for(self, num_tokens: int) -> int:
        """Pages of one group that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def pages_of_sequence(self, num_tokens: int) -> int:
        """Pages of all groups that a sequence of `num_tokens` tokens holds while it decodes."""
        return sum(held_pages(num_tokens, self.page_size, window) for window in self.windows)

    def longest_sequence(self, num_pages: int, limit: int) -> int:
        """Tokens of the longest sequence, at most `limit`, that fits such a pool alone."""
        return bisect_right(range(limit + 1), num_pages, key=self.pages_of_sequence) - 1

    def of_rank(self, ranks: int, whole: Mapping[int, int] | None = None) -> "CacheLayout":
        """The layout of one of `ranks` ranks, each with an equal share of the heads of keys, values
        and matrices and of the channels of convolutions. Latents and index keys are those of all
        heads: every rank has them whole.

        Args:
            whole: layer -> channels of its convolution that every rank has (B and C of Mamba-2, if
                all heads share them).

        Raises:
            InvariantError: heads or channels cannot be divided so.
        """
        replace = msgspec.structs.replace

        def of(group: Group) -> Group:
            return replace(group, entries=tuple(map(of_entry, group.entries)))

        def of_entry(entry: Entry) -> Entry:
            shared = (whole or {}).get(entry.layer, 0)
            planes = tuple(_plane_of_rank(plane, ranks, shared) for plane in entry.planes)
            return replace(entry, planes=planes)

        return replace(self, groups=tuple(map(of, self.groups)))


def _plane_of_rank(plane: Plane, ranks: int, whole_channels: int) -> Plane:
    if plane.name in ("latent", "index"):
        return plane
    # Convolutions have columns in place of heads, and Mamba's scan has a head of all channels.
    is_by_width = plane.name == "columns" or (plane.name == "matrix" and plane.heads == 1)
    axis = "width" if is_by_width else "heads"
    whole = whole_channels if plane.name == "columns" else 0
    extent = getattr(plane, axis) - whole
    # Where there are fewer heads of keys and values than ranks, neighbouring ranks have the same.
    shares = min(extent, ranks) if plane.name in ("k", "v") else ranks
    if extent % shares or ranks % shares:
        raise InvariantError(f"{extent} by {ranks} ranks", field=f"the {axis} of {plane.name}")
    return msgspec.structs.replace(plane, **{axis: extent // shares + whole})


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _window(kind: Full | Window | State) -> int | None:
    if isinstance(kind, Window):
        return kind.tokens
    return 0 if isinstance(kind, State) else None


def held_pages(num_tokens: int, page_size: int, window: int | None) -> int:
    """Pages that a group holds of a sequence of `num_tokens` tokens while it decodes.

    A window may begin and end within a page, the page before it stays (KvPool.num_outside), and so
    does what a window has left until the step that left it is complete. Of states these are the
    last, the snapshot before it, and the one before that until then.
    """
    every = -(-num_tokens // page_size)
    return every if window is None else min(every, -(-window // page_size) + 3)


def attention_entry(layer: int, *, num_kv_heads: int, head_dim: int, dtype: KvDType) -> Entry:
    """The cache of attention: a key and a value for each KV head."""
    keys = Plane(name="k", heads=num_kv_heads, width=head_dim, dtype=dtype)
    return Entry(layer=layer, planes=(keys, msgspec.structs.replace(keys, name="v")))


def latent_entry(layer: int, *, width: int, dtype: KvDType) -> Entry:
    """The cache of latent attention: one latent, from which all heads' keys and values are
    computed, followed by the rotary part of the keys."""
    return Entry(layer=layer, planes=(Plane(name="latent", heads=1, width=width, dtype=dtype),))


def index_entry(layer: int, *, width: int, dtype: KvDType) -> Entry:
    """The cache of what selects a sparse attention's tokens, beside that of the attention."""
    return Entry(layer=layer, planes=(Plane(name="index", heads=1, width=width, dtype=dtype),))


def convolution_entry(layer: int, *, num_columns: int, width: int, dtype: KvDType) -> Entry:
    """The cache of a causal convolution: its last inputs, oldest first."""
    columns = Plane(name="columns", heads=num_columns, width=width, dtype=dtype)
    return Entry(layer=layer, planes=(columns,))


def matrix_entries(
    layer: int,
    *,
    num_columns: int,
    channels: int,
    heads: int,
    key_dim: int,
    value_dim: int,
    dtype: KvDType,
) -> tuple[Entry, Entry]:
    """The cache of a gated delta net or of Mamba: its convolution's last inputs, of the type of
    activations, and a matrix [key_dim, value_dim] in f32 for each head."""
    matrix = Plane(name="matrix", heads=heads, width=key_dim * value_dim, dtype="f32")
    columns = convolution_entry(layer, num_columns=num_columns, width=channels, dtype=dtype)
    return columns, Entry(layer=layer, planes=(matrix,))
