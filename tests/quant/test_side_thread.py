"""Work beside the caller: its order, its end and its errors."""

import threading
from collections.abc import Callable

import pytest

from trtc.quant.side_thread import side_thread


def raising(error: Exception) -> Callable[[], None]:
    def work() -> None:
        raise error

    return work


def test_pieces_are_done_in_order_while_the_caller_goes_on() -> None:
    done: list[int] = []
    opened = threading.Event()
    with side_thread() as side:
        side.give(lambda: done.append(int(opened.wait(10))))
        side.give(lambda: done.append(2))
        assert done == []
        opened.set()
        side.wait()
        assert done == [1, 2]
        side.give(lambda: done.append(3))
    assert done == [1, 2, 3]


@pytest.mark.parametrize("waits", [True, False], ids=["wait", "end"])
def test_an_error_is_raised_where_the_caller_waits(waits: bool) -> None:
    reached: list[str] = []
    with pytest.raises(OSError, match="the first"), side_thread() as side:
        side.give(raising(OSError("the first")))
        side.give(raising(ValueError("the second")))
        if waits:
            side.wait()
        reached.append("the end")
    assert bool(reached) != waits


def test_an_error_of_the_block_leaves_out_what_has_not_begun() -> None:
    begun, opened, done = threading.Event(), threading.Event(), list[str]()

    def first() -> None:
        begun.set()
        opened.wait(10)
        done.append("first")
        raise OSError("hidden by the block's")

    with pytest.raises(ValueError, match="the block"), side_thread() as side:
        side.give(first)
        side.give(lambda: done.append("second"))
        begun.wait(10)
        threading.Timer(0.1, opened.set).start()
        raise ValueError("the block's")
    assert done == ["first"]
