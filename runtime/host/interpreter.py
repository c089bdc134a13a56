"""Python settings of a process that runs engines. They are process-wide: one block at a time.

A full garbage collection visits every object and stops every thread: 0.1 to 0.2 s with a large
library like torch loaded, while a decode step takes a tenth of that.
"""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

_YOUNG_OBJECTS = 5_000
"""Threshold of the youngest generation, in allocations minus deallocations: a step of hundreds of
sequences makes thousands of objects, nearly all of which are freed by reference counting."""


@contextmanager
def few_collections() -> Iterator[None]:
    """Context manager: the garbage collector ignores existing objects (`gc.freeze`) and runs less
    often. Enter it after all long-lived objects have been created."""
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
    """Context manager for imports and opening engines in trtc's own programs, which saves a fifth
    of the time to the first token.

    NumPy is imported without threads for GEMMs, unless it is already imported or
    OPENBLAS_NUM_THREADS is set. The garbage collector is off within the block, and ignores the
    objects that exist at its end: its first run would visit all of them, within the first step.

    Not for users' programs, which may compute with NumPy.
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
