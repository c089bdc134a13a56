"""How a process that runs engines has Python behave. Of the whole process: one block at a time.

Objects that refer to each other in circles are found by looking at all others, with every thread
standing still: 0.1 to 0.2 s with a large library like torch loaded, while a decode step takes a
tenth of that.
"""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

_YOUNG_OBJECTS = 5_000
"""More new objects than freed ones before the newest are looked at: a step of hundreds of sequences
makes thousands, and frees nearly all of them by itself."""


@contextmanager
def few_collections() -> Iterator[None]:
    """For the time of the block, which begins when all that lasts has been opened, what exists is
    never looked at, and new objects less often."""
    threshold = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, *threshold[1:])
    try:
        yield
    finally:
        gc.set_threshold(*threshold)
        gc.unfreeze()


@contextmanager
def quick_start() -> Iterator[None]:
    """Import modules and open engines without what a program that is trtc's own has no use for: a
    fifth of the time to a first token.

    NumPy, unless it is there already or OPENBLAS_NUM_THREADS is set, comes without threads for
    matrix products. No garbage is looked for meanwhile, nor ever among what there is by the end:
    the first look would be at all of it, within the first step.

    Not for a user's program, which may have products to compute.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
