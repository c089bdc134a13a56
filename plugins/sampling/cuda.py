"""Launches of the sampler's stages; tensors.py lists the tensors and when each stage runs."""

from collections.abc import Mapping
from typing import Any

from trtc.plugins.gpu.lowering import DIMS, Extent, Launch
from trtc.plugins.gpu.triton_launch import power_of_two, triton_launch
from trtc.plugins.sampling.tensors import (
    BLOCK,
    CANDIDATE_BLOCKS,
    CANDIDATES,
    DRAW,
    DRAW_FILTERED,
    DRAWN_LOGPROBS,
    EDIT,
    LIKELIEST,
    MASK,
    SEARCH_PART,
    SEARCH_UNROLLED,
    TAKE_SAMPLED,
    num_blocks,
    sampling_tensors,
    search_parts,
)
from trtc.plugins.sampling.triton.draw import draw
from trtc.plugins.sampling.triton.edits import edit
from trtc.plugins.sampling.triton.logprobs import drawn_logprobs, likeliest
from trtc.plugins.sampling.triton.masks import mask
from trtc.plugins.sampling.triton.search import finish, search
from trtc.plugins.sampling.triton.stats import block_stats
from trtc.plugins.sampling.triton.thresholds import thresholds
from trtc.plugins.sampling.triton.tokens import take_sampled
from trtc.protos.requests import MAX_LOGPROBS
from trtc.protos.step import num_mask_words

_BLOCKS = 32
"""Blocks of logits a program of `block_stats`."""
_ENTRIES = 1024
"""Entries of a sparse list that a program takes at once."""
_WORDS = 64
"""Words of a row's mask that a program takes: as many logits as 2048."""
_TOKENS = 256
"""Of a program of `take_sampled`."""
_LANES = 1024
"""Logits that a program of `thresholds` loads at once where it passes over a row."""
_NUM_SEARCHES = 10
"""Launches of `search` that bring any range of keys down to one: 9 ** 10 > 2 ** 31. An even number,
as `finish` has it."""
_ROWS = Extent("rows")


def stages(vocab_size: int, sm: int) -> Mapping[str, tuple[Launch, ...]]:
    """Launches of every stage. Their arguments are names of `sampling_tensors`, "logits",
    "token_ids" and DIMS; grids grow with rows and tokens."""
    dtypes = {one.name: one.dtype for one in sampling_tensors(vocab_size)}
    dtypes |= {"logits": "f32", "token_ids": "i32", DIMS: "i32"}
    vocab = {"VOCAB": vocab_size, "BLOCK": BLOCK}
    row = {**vocab, "BLOCKS_PAD": power_of_two(num_blocks(vocab_size))}

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
    parts = Extent("rows", times=-(-num_blocks(vocab_size) // blocks))
    stats = {**vocab, "BLOCKS": blocks}
    masks = Extent("rows", times=-(-num_mask_words(vocab_size) // _WORDS))
    editing = {"VOCAB": vocab_size, "ENTRIES": _ENTRIES}
    edited_stats = launch(block_stats, stats, 4, parts, without=("num_logprobs",))
    raw_stats = launch(block_stats, stats, 4, parts, without=("temperature",))
    limits = {
        **row,
        "CANDIDATES": CANDIDATE_BLOCKS,
        "LISTED": CANDIDATES,
        "LANES": _LANES,
    }
    num_parts = search_parts(vocab_size)
    in_parts = Extent("rows", times=num_parts)
    searching = {
        **row,
        "PARTS": num_parts,
        "PARTS_PAD": power_of_two(num_parts),
        "LANES": SEARCH_PART // SEARCH_UNROLLED,
    }
    searches = [
        launch(search, {**searching, "NUMBER": number}, 8, in_parts) for number in (0, 1, 2)
    ]
    return {
        LIKELIEST: (raw_stats, launch(likeliest, {**row, "WIDTH": MAX_LOGPROBS}, 4)),
        EDIT: (launch(edit, editing, 8),),
        MASK: (launch(mask, {"VOCAB": vocab_size, "WORDS": _WORDS}, 4, masks),),
        DRAW: (edited_stats, launch(draw, row, 4, without=("threshold",))),
        DRAW_FILTERED: (
            edited_stats,
            launch(thresholds, limits, 16),
            searches[0],
            *(searches[2 - number % 2] for number in range(1, _NUM_SEARCHES)),
            launch(finish, searching, 8, in_parts),
            launch(draw, row, 4),
        ),
        DRAWN_LOGPROBS: (launch(drawn_logprobs, editing, 8),),
        TAKE_SAMPLED: (
            launch(take_sampled, {"TOKENS": _TOKENS}, 4, Extent("tokens", block=_TOKENS)),
        ),
    }
