import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtc.runtime.text.stop import StopScanner


def scan(pieces: list[str], stops: list[str], include_stop: bool = False) -> tuple[str, str]:
    scanner = StopScanner(stops, include_stop=include_stop)
    text = ""
    for piece in pieces:
        certain, stop = scanner.push(piece)
        text += certain
        if stop:
            return text, stop
    return text + scanner.flush(), ""


def oracle(text: str, stops: list[str], include_stop: bool) -> tuple[str, str]:
    """The stop that ends first; of several that end together, the longest."""
    found = [
        (end, -len(stop), stop)
        for stop in stops
        for end in range(len(stop), len(text) + 1)
        if text[:end].endswith(stop)
    ]
    if not found:
        return text, ""
    end, _, stop = min(found)
    return text[: end if include_stop else end - len(stop)], stop


@given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
    include_stop=st.booleans(),
)
def test_the_cut_of_the_text_does_not_matter(
    pieces: list[str], stops: list[str], include_stop: bool
) -> None:
    assert scan(pieces, stops, include_stop) == oracle("".join(pieces), stops, include_stop)


@pytest.mark.parametrize("stop", ["\n\n", "</s>", "é😀", "abab"])
def test_a_stop_is_found_one_character_at_a_time(stop: str) -> None:
    assert scan(list("x" + stop + "y"), [stop]) == ("x", stop)


def test_only_what_may_begin_a_stop_is_held_back() -> None:
    scanner = StopScanner(["END"], include_stop=False)
    assert scanner.push("the E") == ("the ", "")
    assert scanner.push("N") == ("", "")
    assert scanner.push("t") == ("ENt", "")
    assert scanner.push("EEN") == ("E", "")
    assert scanner.push("D of it") == ("", "END")


def test_a_stop_that_comes_too_early_is_text() -> None:
    scanner = StopScanner(["aba"], include_stop=False)
    assert scanner.push("xaba", may_stop=False) == ("xab", "")
    assert scanner.push("ba", may_stop=True) == ("", "aba"), "one that begins early counts"
    scanner = StopScanner(["END"], include_stop=False)
    assert scanner.push("END", may_stop=False) == ("END", "")
    assert scanner.push("END") == ("", "END")


def test_without_stops_nothing_is_held_back() -> None:
    scanner = StopScanner([], include_stop=False)
    assert scanner.push("anything") == ("anything", "")
    assert scanner.flush() == ""
