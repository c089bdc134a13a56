"""How a process that runs engines has Python behave. Of the whole process: one block at a time.

A full run of the cyclic garbage collector visits every object and stops every thread: 0.1 to 0.2 s
with a large library like torch loaded, while a decode step takes a tenth of that.
"""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

_YOUNG_OBJECTS = 5_000
"""Threshold of the youngest generation, allocations less deallocations: a step of hundreds of
sequences makes thousands of objects, and reference counts free nearly all of them."""


@contextmanager
def few_collections() -> Iterator[None]:
    """During the block, which begins when all that lasts has been opened, the garbage collector
    leaves out what exists (`gc.freeze`) and runs less often."""
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
    GEMMs. The garbage collector is off meanwhile, and never visits what exists at the end: its
    first run would visit all of that, within the first step.

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
