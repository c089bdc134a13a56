"""The sampler's stages as launches; tensors.py says when each runs and on what."""

from collections.abc import Mapping
from typing import Any

import triton

from trtc.plugins.cuda.launch import DIMS, Extent, Launch
from trtc.plugins.cuda.specialise import triton_launch
from trtc.plugins.sampling.kernels.draw import draw
from trtc.plugins.sampling.kernels.edits import edit, restore
from trtc.plugins.sampling.kernels.logprobs import logprobs
from trtc.plugins.sampling.kernels.stats import block_stats
from trtc.plugins.sampling.kernels.thresholds import thresholds
from trtc.plugins.sampling.kernels.tokens import take_sampled
from trtc.plugins.sampling.tensors import (
    BLOCK,
    CANDIDATE_BLOCKS,
    DRAW,
    DRAW_FILTERED,
    EDIT,
    LOGPROBS,
    MAX_LOGPROBS,
    RESTORE,
    TAKE_SAMPLED,
    num_blocks,
    sampling_tensors,
)

_BLOCKS = 32
"""Blocks of logits a program of `block_stats`."""
_ENTRIES = 1024
"""Entries of a sparse list that a program takes at once."""
_TOKENS = 256
"""Of a program of `take_sampled`."""
_LANES = 2048
"""Logits that a program of `thresholds` loads at once."""
_ROWS = Extent("rows")


def stages(vocab_size: int, sm: int) -> Mapping[str, tuple[Launch, ...]]:
    """Launches of every stage. Their arguments are names of `sampling_tensors`, "logits",
    "token_ids" and DIMS; grids grow with rows and tokens."""
    dtypes = {one.name: one.dtype for one in sampling_tensors(vocab_size)}
    dtypes |= {"logits": "f32", "token_ids": "i32", DIMS: "i32"}
    vocab = {"VOCAB": vocab_size, "BLOCK": BLOCK}
    row = {**vocab, "BLOCKS_PAD": triton.next_power_of_2(num_blocks(vocab_size))}

    def launch(
        function: Any,
        constants: Mapping[str, int],
        num_warps: int,
        programs: Extent = _ROWS,
        without: tuple[str, ...] = (),
    ) -> Launch:
        return triton_launch(
            function,
            dtypes={name: dtype for name, dtype in dtypes.items() if name not in without},
            constants=constants,
            programs=programs,
            num_warps=num_warps,
            sm=sm,
        )

    blocks = min(_BLOCKS, row["BLOCKS_PAD"])
    parts = Extent("rows", times=triton.cdiv(num_blocks(vocab_size), blocks))
    stats = {**vocab, "BLOCKS": blocks}
    editing = {"VOCAB": vocab_size, "ENTRIES": _ENTRIES}
    edited_stats = launch(block_stats, stats, 4, parts, without=("num_logprobs",))
    raw_stats = launch(block_stats, stats, 4, parts, without=("temperature",))
    limits = {**row, "CANDIDATES": CANDIDATE_BLOCKS, "LANES": _LANES}
    return {
        EDIT: (launch(edit, editing, 8),),
        DRAW: (edited_stats, launch(draw, row, 4, without=("threshold",))),
        DRAW_FILTERED: (edited_stats, launch(thresholds, limits, 16), launch(draw, row, 4)),
        RESTORE: (launch(restore, editing, 8),),
        LOGPROBS: (raw_stats, launch(logprobs, {**row, "WIDTH": MAX_LOGPROBS}, 4)),
        TAKE_SAMPLED: (
            launch(take_sampled, {"TOKENS": _TOKENS}, 4, Extent("tokens", block=_TOKENS)),
        ),
    }
