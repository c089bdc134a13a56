"""The arena: overlapping lives never share bytes, and reuse happens."""

from hypothesis import given, settings
from hypothesis import strategies as st

from trtc.builder.memory import ALIGNMENT, Life, align, place

LIVES = st.lists(
    st.builds(
        lambda size, first, length: Life(size, first, first + length),
        st.integers(1, 5000),
        st.integers(0, 30),
        st.integers(0, 12),
    ),
    max_size=40,
)


@given(LIVES)
@settings(max_examples=400)
def test_overlapping_lives_never_share_bytes(lives: list[Life]) -> None:
    offsets, arena = place(lives)
    placed = list(zip(lives, offsets, strict=True))
    for number, (life, offset) in enumerate(placed):
        assert offset % ALIGNMENT == 0
        assert offset >= 0 and offset + life.bytes <= arena
        for other, other_offset in placed[:number]:
            if life.overlaps(other):
                apart = offset + life.bytes <= other_offset or other_offset + other.bytes <= offset
                assert apart, (life, offset, other, other_offset)


@given(LIVES)
def test_arena_is_between_the_largest_moment_and_the_sum(lives: list[Life]) -> None:
    _, arena = place(lives)
    moments = [
        sum(align(life.bytes) for life in lives if life.first <= now <= life.last)
        for now in range(45)
    ]
    assert max(moments, default=0) <= arena <= sum(align(life.bytes) for life in lives)


@given(LIVES)
def test_placing_is_repeatable(lives: list[Life]) -> None:
    assert place(lives) == place(list(lives))


def test_a_chain_needs_two_places_whatever_its_length() -> None:
    chain = [Life(1000, step, step + 1) for step in range(20)]
    _, arena = place(chain)
    assert arena == 2 * align(1000)


def test_a_life_that_ends_where_another_begins_overlaps_it() -> None:
    offsets, _ = place([Life(64, 0, 3), Life(64, 3, 5)])
    assert offsets[0] != offsets[1]
