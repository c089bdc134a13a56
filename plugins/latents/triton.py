"""Which sequences of a step are expanded, in Triton: as plugins/latents/expansion.py."""

import triton
import triton.language as tl

from trtc.plugins.gpu.lowering import Site
from trtc.plugins.gpu.triton_launch import power_of_two
from trtc.plugins.latents.expansion import ALIGNMENT


def expansion_constants(site: Site) -> dict[str, int]:
    """Constants of every kernel that calls `expansion`."""
    return {
        "LEAST_NEW": int(site.attributes["least_new"]),
        "ROOM": int(site.attributes["room"]),
        "MOST_CONTEXT": int(site.attributes["most_context"]),
        "ALIGNMENT": ALIGNMENT,
        "SEQUENCES": max(2, power_of_two(site.limits.max_batch_size)),
    }


@triton.jit
def expansion(
    query_start,
    context_lens,
    num_sequences,
    LEAST_NEW: tl.constexpr,
    ROOM: tl.constexpr,
    MOST_CONTEXT: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    SEQUENCES: tl.constexpr,
):
    """([SEQUENCES] tokens that each sequence takes of the buffer, [SEQUENCES] where it ends there).

    A sequence that is not expanded takes none. One that there is no room for, and all after it, end
    behind ROOM.
    """
    sequence = tl.arange(0, SEQUENCES)
    is_real = sequence < num_sequences
    begin = tl.load(query_start + sequence, mask=is_real, other=0)
    end = tl.load(query_start + sequence + 1, mask=is_real, other=0)
    context = tl.load(context_lens + sequence, mask=is_real, other=0)
    asked = (context + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    is_prompt = end - begin >= LEAST_NEW
    if MOST_CONTEXT > 0:
        is_prompt = is_prompt & (context <= MOST_CONTEXT)
    # More than ROOM would be as good, and might overflow the sum.
    taken = tl.where(is_prompt, tl.minimum(asked, ROOM + ALIGNMENT), 0)
    return taken, tl.cumsum(taken, 0)


@triton.jit
def place_of(sequence, taken, ends, ROOM: tl.constexpr):
    """The sequence's first token in the buffer; -1: it is not expanded."""
    mine = tl.arange(0, taken.shape[0]) == sequence
    takes = tl.sum(tl.where(mine, taken, 0), 0)
    end = tl.sum(tl.where(mine, ends, 0), 0)
    return tl.where((takes > 0) & (end <= ROOM), end - takes, -1)
