"""Copies token ids that the previous step sampled into the inputs of this step."""

import triton
import triton.language as tl

from trtc.plugins.gpu.triton import wait_for_inputs


@triton.jit
def take_sampled(
    token_sources,
    sampled,
    dims,
    token_ids,
    TOKENS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """token_ids[t] = sampled[token_sources[t]], where that is not negative; TOKENS a program.

    It writes a step input, which later kernels may read before they wait: the next one must not
    start early.
    """
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = token < tl.load(dims)
    source = tl.load(token_sources + token, mask=inside, other=-1)
    wait_for_inputs(OVERLAPS)
    pending = source >= 0
    tl.store(token_ids + token, tl.load(sampled + source, mask=pending, other=0), mask=pending)
