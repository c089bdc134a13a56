"""Fills the block of int32 that takes a step's inputs to the device in one copy."""

import numpy as np
from numpy.typing import NDArray

from trtc.protos.launches import StepBlock
from trtc.runtime.executors.base import NO_SOURCE, Int32s, StepBatch
from trtc.runtime.philox import uniforms
from trtc.runtime.sampler import SamplingBatch, SparseRows

_SAMPLING_COLUMNS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "num_logprobs",
)
"""Of SamplingBatch: f32 travels as its bits."""
_LOW_BITS = 27
"""Of a random number's 53."""


def fill_step(block: Int32s, layout: StepBlock, batch: StepBatch, num_sequences: int) -> int:
    """Write a step into `block`; elements from its start that have to be sent.

    Sequences after the real ones, up to `num_sequences`, are empty: no new tokens, no context.
    """
    tokens, sequences = len(batch.token_ids), len(batch.context_lens)
    padding = num_sequences - sequences
    _put(block, layout, "dims", (tokens, sequences, len(batch.logit_rows), 0))
    starts = np.append(batch.query_start, np.full(padding, tokens, np.int32))
    _put(block, layout, "query_start", starts)
    contexts = np.append(batch.context_lens, np.zeros(padding, np.int32))
    _put(block, layout, "context_lens", contexts)
    for name in ("logit_rows", "token_ids", "positions", "slots"):
        _put(block, layout, name, getattr(batch, name))
    begin = layout.offsets["token_sources"]
    sources = batch.token_sources
    block[begin : begin + tokens] = NO_SOURCE if sources is None else sources
    begin = layout.offsets["page_table"]
    end = begin + sequences * layout.table_width
    table = block[begin:end].reshape(sequences, layout.table_width)
    table[:, : batch.page_table.shape[1]] = batch.page_table
    return end


def fill_sampling(block: Int32s, layout: StepBlock, sampling: SamplingBatch) -> None:
    """Write how each logit row is drawn, its random number included."""
    for name in _SAMPLING_COLUMNS:
        _put(block, layout, name, getattr(sampling, name).view(np.int32))
    _put(block, layout, "random", _random_words(sampling))
    _put(block, layout, "bias_start", row_starts(sampling.bias, sampling.num_rows))
    _put(block, layout, "seen_start", row_starts(sampling.seen, sampling.num_rows))


def row_starts(entries: SparseRows, num_rows: int) -> Int32s:
    """[num_rows + 1] where the entries of each row begin; they are sorted by row."""
    return np.searchsorted(entries.rows, np.arange(num_rows + 1)).astype(np.int32)


def _random_words(sampling: SamplingBatch) -> Int32s:
    """[2 R] upper 26 and lower 27 bits of each row's number in [0, 1); greedy rows need none."""
    if not sampling.temperature.any():
        return np.zeros(2 * sampling.num_rows, np.int32)
    numbers = uniforms(sampling.seed, sampling.sequence, sampling.position)
    bits: NDArray[np.int64] = (numbers * 2.0**53).astype(np.int64)
    words = np.stack((bits >> _LOW_BITS, bits & ((1 << _LOW_BITS) - 1)), axis=1)
    return words.astype(np.int32).reshape(-1)


def _put(
    block: Int32s, layout: StepBlock, name: str, values: Int32s | tuple[int, int, int, int]
) -> None:
    begin = layout.offsets[name]
    block[begin : begin + len(values)] = values
