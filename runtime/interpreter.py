"""How Python looks for garbage while engines run.

Objects that refer to each other in circles are found by looking at all others, with every thread
standing still: 0.1 to 0.2 s once torch is loaded, while a decode step takes a tenth of that.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_YOUNG_OBJECTS = 5_000
"""More new objects than freed ones before the newest are looked at: a step of hundreds of sequences
makes thousands, and frees nearly all of them by itself."""


@contextmanager
def few_collections() -> Iterator[None]:
    """For the time of the block, which begins when all that lasts has been opened, what exists is
    never looked at, and new objects less often. Of the whole process: one block at a time."""
    threshold = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, *threshold[1:])
    try:
        yield
    finally:
        gc.set_threshold(*threshold)
        gc.unfreeze()
