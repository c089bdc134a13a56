"""An engine's weights on the host: mapped from its file, or random ones in their place."""

import mmap
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trtc.protos.errors import EngineCorruptError
from trtc.protos.plan import read_plan
from trtc.runtime.executors.huge_pages import advise_huge_pages
from trtc.runtime.verify import REBUILD

_ALIGNMENT = 64


def map_weights(path: Path, num_bytes: int) -> NDArray[np.uint8]:
    """The data section of weights.safetensors, mapped and not copied.

    Raises:
        EngineCorruptError: the data section is not `num_bytes` long, or not aligned.
    """
    with path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    advise_huge_pages(mapping)
    begin = 8 + int.from_bytes(mapping[:8], "little")
    if begin % _ALIGNMENT or len(mapping) - begin != num_bytes:
        raise EngineCorruptError(
            f"the data section is {len(mapping) - begin} bytes at {begin}, not "
            f"{num_bytes} at a multiple of {_ALIGNMENT}",
            field=str(path),
            remedy=REBUILD,
        )
    return np.frombuffer(mapping, np.uint8, offset=begin)


def dummy_weights(plan_path: Path) -> NDArray[np.uint8]:
    """Random weights for a plan that was built without any."""
    from trtc.runtime.dummy_weights import fill_weights  # numpy.random takes 10 ms to import

    plan = read_plan(plan_path)
    return fill_weights(plan.weights, plan.weights_bytes)
