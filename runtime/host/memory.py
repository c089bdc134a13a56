"""Returns memory that a process has freed to the system."""

import ctypes
import gc
import sys


def give_back_memory() -> None:
    """Call it after large objects were closed: collects reference cycles, and makes malloc return
    free memory. Frozen objects (`interpreter.few_collections`) are not visited."""
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:  # musl has none
            trim(0)
