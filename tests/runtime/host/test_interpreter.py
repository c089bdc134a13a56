"""Python's collections of garbage while engines start and run."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from trtc.runtime.host.interpreter import few_collections, quick_start


class Ring:
    """Refers to itself: only a collection finds that nobody else does."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def threshold() -> Iterator[tuple[int, int, int]]:
    """Python's own, not that of the session of tests."""
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield gc.get_threshold()
    gc.set_threshold(*before)


def test_what_exists_is_left_out_for_the_time_of_the_block_only(
    threshold: tuple[int, int, int],
) -> None:
    before = weakref.ref(Ring())
    with few_collections():
        inside = weakref.ref(Ring())
        gc.collect()
        assert before() is not None
        assert inside() is None, "what is new is still collected"
        assert gc.get_threshold()[0] > threshold[0]
    gc.collect()
    assert before() is None
    assert gc.get_threshold() == threshold


def test_an_error_ends_the_block_too(threshold: tuple[int, int, int]) -> None:
    with pytest.raises(ZeroDivisionError), few_collections():
        raise ZeroDivisionError
    assert gc.get_freeze_count() == 0
    assert gc.get_threshold() == threshold


def test_a_start_collects_no_garbage_and_leaves_python_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    with quick_start():
        assert not gc.isenabled()
        made = weakref.ref(Ring())
    assert gc.isenabled()
    gc.collect()
    assert made() is not None, "what there is by the end is never looked at"
    gc.unfreeze()
    gc.collect()
    assert made() is None


def test_a_start_in_a_process_without_collections_starts_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    gc.disable()
    try:
        with quick_start():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
