"""Draw tokens by the GPU sampler's stages, whoever runs them."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.support.lowered import RunWork
from tests.support.triton_kernels import INTERPRETED_SM, Work, interpret_work
from trtc.plugins.gpu.lowering import DIMS
from trtc.plugins.sampling.tensors import (
    DRAW,
    DRAW_FILTERED,
    DRAWN_LOGPROBS,
    EDIT,
    LIKELIEST,
    MASK,
    sampling_tensors,
)
from trtc.runtime.sampling.philox import uniforms
from trtc.runtime.sampling.sampler import NO_LOGPROBS, NO_PENDING, SamplingBatch, SparseRows

Array = NDArray[Any]
Arrays = Mapping[str, Array]
STALE_ROWS = 2
_POISON = -1  # as bits: NaN, and an id of no token


def sample_by_stages(
    logits: Array,
    batch: SamplingBatch,
    *,
    sampled: Array | None = None,
    run: RunWork = interpret_work,
    sm: int = INTERPRETED_SM,
) -> Arrays:
    """Every tensor after the stages that the batch needs, stale rows cut off.

    Args:
        sampled: the tokens of the step before, where some of the batch's are pending.

    Raises:
        AssertionError: a stale row was written.
    """
    arrays: Arrays = sampling_arrays(logits, batch)
    rows = batch.num_rows
    if sampled is not None:
        arrays["sampled"][: len(sampled), 0] = sampled
    before = {name: array.copy() for name, array in arrays.items()}
    for stage in stages_of(batch):
        arrays = run(stage_work(stage, arrays, sm))
    for tensor in sampling_tensors(logits.shape[1]):
        if tensor.rows == "rows":
            stale, was = arrays[tensor.name][rows:], before[tensor.name][rows:]
            assert stale.tobytes() == was.tobytes(), f"{tensor.name} of a stale row was written"
    return {name: array[:rows] for name, array in arrays.items()}


def stage_work(stage: str, arrays: Arrays, sm: int = INTERPRETED_SM) -> Work:
    rows, vocab_size = arrays["logits"].shape
    return Work(
        lower="trtc.plugins.sampling.cuda:stages",
        arguments=(vocab_size, sm),
        pick=stage,
        bucket={"rows": rows, "tokens": rows, "one": 1},
        arrays=arrays,
    )


def stages_of(batch: SamplingBatch) -> tuple[str, ...]:
    has_entries = len(batch.bias.rows) + len(batch.seen.rows) > 0
    edits = has_entries or batch.pending is not None
    asks = bool((batch.num_logprobs != NO_LOGPROBS).any())
    filters = bool(((batch.top_k > 0) | (batch.top_p < 1) | (batch.min_p > 0)).any())
    return (
        *((MASK,) if batch.masks is not None else ()),
        *((LIKELIEST,) if asks else ()),
        *((EDIT,) if edits else ()),
        DRAW_FILTERED if filters else DRAW,
        *((DRAWN_LOGPROBS,) if asks else ()),
    )


def sampling_arrays(logits: Array, batch: SamplingBatch) -> dict[str, Array]:
    """Inputs as the runtime fills them in; everything else is poison, and stale rows are too."""
    rows, vocab_size = logits.shape
    random = uniforms(batch.seed, batch.sequence, batch.position)
    bits = (random * 2.0**53).astype(np.int64)
    given: dict[str, Array] = {
        name: getattr(batch, name)
        for name in (
            *("temperature", "top_k", "top_p", "min_p", "num_logprobs"),
            *("repetition_penalty", "presence_penalty", "frequency_penalty"),
        )
    }
    given["random"] = np.stack((bits >> 27, bits & (2**27 - 1)), axis=1).astype(np.int32)
    given |= _sparse("bias", "values", batch.bias, rows) | _sparse(
        "seen", "counts", batch.seen, rows
    )
    masked = 0
    if batch.masks is not None:
        masked = len(batch.masks.rows)
        given["mask_words"] = batch.masks.words.view(np.int32)
        given["mask_index"] = np.full(rows, -1, np.int32)
        given["mask_index"][batch.masks.rows] = np.arange(masked)
    given["pending"] = np.full(rows, NO_PENDING) if batch.pending is None else batch.pending
    arrays: dict[str, Array] = {}
    for tensor in sampling_tensors(vocab_size):
        extent = {
            "rows": rows + STALE_ROWS,
            "rows+1": rows + STALE_ROWS + 1,
            "tokens": rows + STALE_ROWS,
            "seen": len(batch.seen.rows) + 1,
            "biased": len(batch.bias.rows) + 1,
            "masked": masked + 1,
        }[tensor.rows]
        dtype = np.float32 if tensor.dtype == "f32" else np.int32
        array = np.full((extent, tensor.columns), _POISON, np.int32).view(dtype)
        values = given.get(tensor.name)
        if values is not None:
            array[: len(values)] = values.reshape(len(values), tensor.columns)
        arrays[tensor.name] = array
    stale = np.full((STALE_ROWS, vocab_size), np.nan, np.float32)
    arrays["logits"] = np.concatenate((logits, stale))
    arrays["token_ids"] = np.full(rows + STALE_ROWS, _POISON, np.int32)
    arrays[DIMS] = np.array([rows, rows, rows, 0], np.int32)
    return arrays


def _sparse(name: str, values: str, entries: SparseRows, num_rows: int) -> dict[str, Array]:
    order = np.argsort(entries.rows, kind="stable")
    starts = np.searchsorted(entries.rows[order], np.arange(num_rows + 1))
    return {
        f"{name}_start": starts.astype(np.int32),
        f"{name}_token_ids": entries.token_ids[order],
        f"{name}_{values}": entries.values[order],
    }
