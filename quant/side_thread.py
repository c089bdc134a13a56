"""A thread that does what need not be waited for, such as writing files, piece after piece."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager


class SideThread:
    """Takes pieces of work, and does them in their order.

    Args:
        pool: of one thread.
    """

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._given: list[Future[None]] = []

    def give(self, work: Callable[[], None]) -> None:
        """What it holds is let go when it is done."""
        self._given.append(self._pool.submit(work))

    def wait(self) -> None:
        """Until all that was given is done.

        Raises:
            What the first piece raised that did.
        """
        given, self._given = self._given, []
        for piece in given:
            piece.result()


@contextmanager
def side_thread() -> Iterator[SideThread]:
    """Context manager that ends when all is done; with an error of its block, when the piece that
    runs is done: the others are left out."""
    pool = ThreadPoolExecutor(1, "trtc-side")
    side = SideThread(pool)
    try:
        yield side
        side.wait()
    finally:
        pool.shutdown(cancel_futures=True)
