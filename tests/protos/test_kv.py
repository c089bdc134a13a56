"""The cache layout: bytes, places and what it refuses."""

from typing import Any

import msgspec
import pytest

from trtc.protos.errors import InvariantError
from trtc.protos.kv import (
    CacheLayout,
    Entry,
    Full,
    Group,
    Plane,
    State,
    Window,
    attention_entry,
    convolution_entry,
    index_entry,
    latent_entry,
    matrix_entries,
)
from trtc.protos.record import first_difference


def entry(layer: int, heads: int = 2, width: int = 16) -> Entry:
    return attention_entry(layer, num_kv_heads=heads, head_dim=width, dtype="bf16")


def state(layer: int) -> Entry:
    return convolution_entry(layer, num_columns=2, width=16, dtype="bf16")


def mixed() -> CacheLayout:
    """Two full layers of different sizes; windows in two groups, of which one is shorter."""
    return CacheLayout(
        page_size=8,
        groups=(
            Group(kind=Full(), entries=(entry(2), entry(5, heads=1, width=64))),
            Group(kind=Window(tokens=24), entries=(entry(0), entry(1, heads=4))),
            Group(kind=Window(tokens=24), entries=(entry(3),)),
        ),
    )


def test_a_page_has_the_bytes_of_every_region() -> None:
    layout = mixed()
    key = 8 * 2 * 16 * 2  # page_size * heads * width * bytes of bf16
    assert layout.region_bytes == (2 * key, 2 * 2 * key)
    assert layout.page_bytes == 6 * key


def test_places_are_in_the_order_of_the_layers() -> None:
    found = [(one.name, one.group, one.region) for one in mixed().places]
    assert found == [
        ("kv_0", 1, 0),
        ("kv_1", 1, 1),
        ("kv_2", 0, 0),
        ("kv_3", 2, 0),
        ("kv_5", 0, 1),
    ]


def test_layers_of_one_region_see_it_in_their_own_shape() -> None:
    layout = mixed()
    shapes = {one.name: layout.pool_shape(one) for one in layout.places}
    assert shapes["kv_5"] == ("num_pages", 2, 8, 1, 64)
    assert shapes["kv_1"] == ("num_pages", 2, 8, 4, 16)


def test_int8_has_a_scale_of_each_token_and_head() -> None:
    of_int8 = attention_entry(0, num_kv_heads=3, head_dim=64, dtype="i8")
    layout = CacheLayout(page_size=16, groups=(Group(kind=Full(), entries=(of_int8,)),))
    assert layout.page_bytes == 2 * 16 * 3 * (64 + 4)
    (place,) = layout.places
    assert layout.pool_shape(place) == ("num_pages", 2, 16, 3, 68)
    assert layout.of_rank(3).page_bytes * 3 == layout.page_bytes


def test_int4_has_two_elements_in_a_byte_and_a_scale_of_each_token_and_head() -> None:
    of_int4 = attention_entry(0, num_kv_heads=3, head_dim=64, dtype="i4")
    layout = CacheLayout(page_size=16, groups=(Group(kind=Full(), entries=(of_int4,)),))
    assert layout.page_bytes == 2 * 16 * 3 * (32 + 4)
    (place,) = layout.places
    assert place.entry.element == "u8"
    assert layout.pool_shape(place) == ("num_pages", 2, 16, 3, 36)
    assert layout.of_rank(3).page_bytes * 3 == layout.page_bytes
    with pytest.raises(ValueError, match="63 elements of i4 are not whole bytes"):
        attention_entry(0, num_kv_heads=3, head_dim=63, dtype="i4")


@pytest.mark.parametrize("dtype", ["i8", "i4"])
@pytest.mark.parametrize("name", ["latent", "index", "columns", "matrix"])
def test_scales_are_for_keys_and_values(name: Any, dtype: Any) -> None:
    with pytest.raises(ValueError, match=f"a plane {name} has no {dtype}"):
        Plane(name=name, heads=1, width=64, dtype=dtype)


def with_states(*sizes: int) -> CacheLayout:
    """Two full layers of 512 and 1024 bytes a page, and states of so many bytes."""
    states = tuple(
        convolution_entry(10 + number, num_columns=2, width=size // 4, dtype="bf16")
        for number, size in enumerate(sizes)
    )
    full = Group(kind=Full(), entries=(entry(2), entry(5, heads=4)))
    return CacheLayout(page_size=4, groups=(full, Group(kind=State(), entries=states)))


def places_of_states(layout: CacheLayout) -> list[tuple[int, int]]:
    return [(one.region, one.offset) for one in layout.places if one.group == 1]


def test_states_lie_side_by_side_in_the_regions_of_tokens() -> None:
    layout = with_states(256, 256, 400, 400, 64)
    assert places_of_states(layout) == [(0, 0), (0, 256), (1, 0), (1, 448), (1, 896)]
    assert layout.region_bytes == (512, 1024) == with_states(4).region_bytes
    assert layout.windows == (None, 0)
    assert layout.pool_shape(layout.places[2]) == ("num_pages", 2, 64)
    # However long it is: the last state, the snapshot before, and one that a step lets go of.
    assert [layout.pages_of_sequence(n) for n in (1, 5, 9, 400)] == [2, 4, 6, 103]


def test_a_state_that_no_region_has_room_for_has_its_own() -> None:
    layout = with_states(512, 1000, 100, 2000, 400)
    assert places_of_states(layout) == [(0, 0), (1, 0), (2, 0), (3, 0), (4, 0)]
    assert layout.region_bytes == (512, 1024, 128, 2048, 448)
    alone = CacheLayout(page_size=4, groups=layout.groups[1:])
    assert alone.region_bytes == (512, 1024, 128, 2048, 448)


def test_a_layer_may_have_two_states() -> None:
    entries = matrix_entries(
        3, num_columns=3, channels=32, heads=2, key_dim=4, value_dim=8, dtype="bf16"
    )
    layout = CacheLayout(page_size=4, groups=(Group(kind=State(), entries=entries),))
    assert [one.name for one in layout.places] == ["kv_3", "kv_3_matrix"]
    assert [one.entry.element for one in layout.places] == ["bf16", "f32"]
    assert [layout.pool_shape(one)[1:] for one in layout.places] == [(3, 32), (2, 32)]
    assert layout.page_bytes == 3 * 32 * 2 + 2 * 4 * 8 * 4
    with pytest.raises(ValueError, match="two entries of one kind"):
        CacheLayout(page_size=4, groups=(Group(kind=State(), entries=(*entries, entries[1])),))


def test_a_layer_that_reads_the_entry_of_another_has_none_of_its_own() -> None:
    shared = msgspec.structs.replace(entry(0), shared_by=(3, 4))
    layout = CacheLayout(page_size=8, groups=(Group(kind=Full(), entries=(shared, entry(1))),))
    assert [one.entry.layer for one in layout.places] == [0, 1]
    assert layout.page_bytes == 8 * (shared.num_bytes + entry(1).num_bytes)
    with pytest.raises(ValueError, match="two entries of one kind"):
        CacheLayout(page_size=8, groups=(Group(kind=Full(), entries=(shared, entry(3))),))


def test_a_rank_has_its_share_of_a_states_channels() -> None:
    layout = with_states(256).of_rank(2)
    assert layout.groups[1].entries[0].planes[0].width == 32
    assert layout.groups[1].entries[0].planes[0].heads == 2


def test_a_rank_has_its_share_of_matrices_and_all_of_latents_and_index_keys() -> None:
    entries = matrix_entries(
        0, num_columns=3, channels=32, heads=4, key_dim=4, value_dim=8, dtype="bf16"
    )
    latent = latent_entry(1, width=64, dtype="bf16")
    layout = CacheLayout(
        page_size=4,
        groups=(
            Group(kind=Full(), entries=(latent, index_entry(1, width=32, dtype="bf16"))),
            Group(kind=State(), entries=entries),
        ),
    )
    shapes = {one.name: layout.of_rank(2).pool_shape(one) for one in layout.of_rank(2).places}
    assert shapes["kv_1"] == ("num_pages", 1, 4, 1, 64)
    assert shapes["kv_1_index"] == ("num_pages", 1, 4, 1, 32)
    assert shapes["kv_0"] == ("num_pages", 3, 16)
    assert shapes["kv_0_matrix"] == ("num_pages", 2, 32)
    with pytest.raises(InvariantError, match="the heads of matrix: 4 by 8 ranks"):
        layout.of_rank(8)


def test_a_scan_has_no_heads_but_channels() -> None:
    entries = matrix_entries(
        0, num_columns=3, channels=32, heads=1, key_dim=4, value_dim=32, dtype="bf16"
    )
    layout = CacheLayout(page_size=4, groups=(Group(kind=State(), entries=entries),)).of_rank(2)
    assert layout.groups[0].entries[1].planes[0].width == 4 * 16


def test_a_rank_has_all_of_the_channels_that_its_heads_share() -> None:
    entries = matrix_entries(
        5, num_columns=3, channels=48, heads=4, key_dim=4, value_dim=8, dtype="bf16"
    )
    layout = CacheLayout(page_size=4, groups=(Group(kind=State(), entries=entries),))
    columns, matrix = layout.of_rank(4, {5: 16}).groups[0].entries
    assert columns.planes[0].width == 32 // 4 + 16
    assert matrix.planes[0].heads == 1
    with pytest.raises(InvariantError, match="the width of columns: 41 by 4 ranks"):
        layout.of_rank(4, {5: 7})


def test_a_rank_has_its_share_of_the_heads() -> None:
    layout = CacheLayout(page_size=8, groups=(Group(kind=Full(), entries=(entry(0, heads=4),)),))
    assert layout.of_rank(2).page_bytes * 2 == layout.page_bytes
    assert layout.of_rank(2).groups[0].entries[0].planes[1].heads == 2


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ((Group(kind=Full(), entries=(entry(0),)), Group(kind=Full(), entries=(entry(0),))), "two"),
        (
            (
                Group(kind=Full(), entries=(entry(0),)),
                Group(kind=Full(), entries=(entry(1, heads=4),)),
            ),
            "different sizes",
        ),
        (
            tuple(Group(kind=State(), entries=(state(layer),)) for layer in (0, 1)),
            "more than one group of states",
        ),
    ],
)
def test_what_cannot_be_laid_out_is_refused(groups: tuple[Group, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CacheLayout(page_size=8, groups=groups)


def test_planes_of_one_entry_are_alike() -> None:
    k = Plane(name="k", heads=2, width=16, dtype="bf16")
    with pytest.raises(ValueError, match="planes of layer 3 differ"):
        Entry(layer=3, planes=(k, msgspec.structs.replace(k, name="v", width=8)))


def test_it_survives_json_and_is_checked_there() -> None:
    layout = mixed()
    text = msgspec.json.encode(layout)
    assert msgspec.json.decode(text, type=CacheLayout) == layout
    with pytest.raises(msgspec.ValidationError, match="two entries"):
        msgspec.json.decode(text.replace(b'"layer":5', b'"layer":2'), type=CacheLayout)


def test_the_first_difference_is_found() -> None:
    one = mixed()
    groups = (*one.groups[:2], msgspec.structs.replace(one.groups[2], kind=Window(tokens=25)))
    other = msgspec.structs.replace(one, groups=groups)
    assert first_difference(one, other) == (".groups[2].kind.tokens", "24", "25")
