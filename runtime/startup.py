"""How a program that is trtc's own, and runs engines, gets ready."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_start() -> Iterator[None]:
    """Import modules and open engines without what such a program has no use for: a fifth of the
    time to a first token.

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
