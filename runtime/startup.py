"""The first imports of a program that is trtc's own and runs engines."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import without what a program that runs engines has no use for: a tenth of the time to a
    first token.

    NumPy, unless it is there already or OPENBLAS_NUM_THREADS is set, comes without threads for
    matrix products. No garbage is looked for meanwhile.

    Not for a user's program, which may have products to compute.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
