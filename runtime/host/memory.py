"""Gives memory that a process has freed back to the system."""

import ctypes
import gc
import sys


def give_back_memory() -> None:
    """Once something large was closed: collect what refers to itself, and have malloc give back
    what is free. What was frozen (`interpreter.few_collections`) is not visited."""
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:  # musl has none
            trim(0)
