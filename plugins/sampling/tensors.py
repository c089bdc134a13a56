"""Tensors of the GPU sampler, and the stages that a step needs.

The kernels mean what runtime/sampling/sampler.py means; a step runs, in this order:

    MASK                     if a row has a mask
    LIKELIEST                if a row has log-probabilities to report: of the tokens that are left
    EDIT                     if a row has a bias or a penalty, or a pending token
    DRAW or DRAW_FILTERED    the latter if a row has top-k, top-p or min-p
    DRAWN_LOGPROBS           if a row has log-probabilities to report: of the logits before EDIT

and TAKE_SAMPLED before the next step's embedding, for token ids that the host does not know yet.
Rows are the R logit rows of the step; every kernel reads how many are real from `dims`.
"""

from dataclasses import dataclass
from typing import Literal

from trtc.protos.requests import MAX_LOGPROBS
from trtc.protos.step import SAMPLING_COLUMNS, num_mask_words

LIKELIEST = "likeliest"
EDIT = "edit"
MASK = "mask"
DRAW = "draw"
DRAW_FILTERED = "draw_filtered"
DRAWN_LOGPROBS = "drawn_logprobs"
TAKE_SAMPLED = "take_sampled"
STAGES = (MASK, LIKELIEST, EDIT, DRAW, DRAW_FILTERED, DRAWN_LOGPROBS, TAKE_SAMPLED)

BLOCK = 128
"""Logits summed in one go: a row is searched by block, then inside one block."""
CANDIDATE_BLOCKS = 128
"""Blocks of a row among which its threshold is looked for first."""
CANDIDATES = 512
"""Logits of these blocks that are ranked."""
SEARCH_PART = 8192
"""Logits a program where a whole row is searched."""
SEARCH_UNROLLED = 8
"""Loads of a thread that are in flight at once."""
SEARCH_PIVOTS = 8
"""Values that a pass over a row tries at once."""

Role = Literal["input", "output", "scratch"]
Rows = Literal["rows", "rows+1", "tokens", "seen", "biased", "masked"]
"""Extent of the leading axis: logit rows, tokens, entries of the sparse lists, or masks."""


@dataclass(frozen=True)
class SamplingTensor:
    """A contiguous [rows, columns] tensor on the device."""

    name: str
    dtype: Literal["f32", "i32"]
    rows: Rows
    role: Role
    columns: int = 1


def num_blocks(vocab_size: int) -> int:
    return -(-vocab_size // BLOCK)


def search_parts(vocab_size: int) -> int:
    return -(-vocab_size // SEARCH_PART)


def sampling_tensors(vocab_size: int) -> tuple[SamplingTensor, ...]:
    """All tensors but `logits` [R, vocab_size] f32, `token_ids` [T] i32 and `dims`.

    Columns of one row's parameters are named as in SamplingBatch (runtime/sampling/sampler.py).
    `random` is a number of [0, 1) with 53 bits: the upper 26 and the lower 27. Row r's biases are
    the entries from `bias_start[r]` to `bias_start[r + 1]`, and so with the tokens it has seen; a
    token occurs once in each. Outputs lie next to each other, and what belongs together is fetched
    together.
    Where `pending[r]` is not -1, penalties of row r also count the token that row `pending[r]` of
    the step before drew, which `sampled` still has. EDIT leaves it in `pending_token`, or -1 where
    row r's entries have it.
    `mask_index[r]` is the row of `mask_words` with row r's mask (runtime/sampling/masks.py), or -1.
    `token_sources[t]` is the row that drew token t in the step before, or -1.
    """
    blocks = num_blocks(vocab_size)
    return (
        *(
            SamplingTensor(one.name, one.device_dtype, "rows", "input")
            for one in SAMPLING_COLUMNS
            if one.device_dtype
        ),
        SamplingTensor("random", "i32", "rows", "input", 2),
        SamplingTensor("bias_start", "i32", "rows+1", "input"),
        SamplingTensor("bias_token_ids", "i32", "biased", "input"),
        SamplingTensor("bias_values", "f32", "biased", "input"),
        SamplingTensor("seen_start", "i32", "rows+1", "input"),
        SamplingTensor("seen_token_ids", "i32", "seen", "input"),
        SamplingTensor("seen_counts", "i32", "seen", "input"),
        SamplingTensor("pending", "i32", "rows", "input"),
        SamplingTensor("mask_index", "i32", "rows", "input"),
        SamplingTensor("mask_words", "i32", "masked", "input", num_mask_words(vocab_size)),
        SamplingTensor("token_sources", "i32", "tokens", "input"),
        SamplingTensor("sampled", "i32", "rows", "output"),
        SamplingTensor("invalid", "i32", "rows", "output"),
        SamplingTensor("token_logprobs", "f32", "rows", "output"),
        SamplingTensor("top_ids", "i32", "rows", "output", MAX_LOGPROBS),
        SamplingTensor("top_logprobs", "f32", "rows", "output", MAX_LOGPROBS),
        SamplingTensor("normaliser", "f32", "rows", "scratch"),
        SamplingTensor("bias_before", "f32", "biased", "scratch"),
        SamplingTensor("seen_before", "f32", "seen", "scratch"),
        SamplingTensor("pending_token", "i32", "rows", "scratch"),
        SamplingTensor("pending_before", "f32", "rows", "scratch"),
        SamplingTensor("block_max", "f32", "rows", "scratch", blocks),
        SamplingTensor("block_sum", "f32", "rows", "scratch", blocks),
        SamplingTensor("candidates", "i32", "rows", "scratch", CANDIDATE_BLOCKS),
        SamplingTensor("listed", "f32", "rows", "scratch", CANDIDATES),
        SamplingTensor("threshold", "f32", "rows", "scratch"),
        SamplingTensor("search_mode", "i32", "rows", "scratch"),
        SamplingTensor("search_goal", "f32", "rows", "scratch"),
        SamplingTensor("search_range", "i32", "rows", "scratch", 4),
        SamplingTensor(
            "search_masses",
            "f32",
            "rows",
            "scratch",
            2 * search_parts(vocab_size) * SEARCH_PIVOTS,
        ),
    )
