"""Steps for benchmarks: decodes at a context, and prefills.

Every sequence's pages are its own and lie scattered, so that a decode reads the whole of its keys
and values from memory.
"""

import numpy as np

from trtc.protos.kv import CacheLayout, held_pages
from trtc.runtime.executors.base import Executor, StepBatch


def decode_batch(executor: Executor, sequences: int, context: int) -> StepBatch:
    """One new token each for `sequences` sequences of `context` tokens, pages scattered."""
    kv = executor.kv
    tables = _tables(executor, sequences, context)
    last = context - 1
    return StepBatch(
        token_ids=np.random.default_rng(2).integers(0, executor.vocab_size, sequences, np.int32),
        positions=np.full(sequences, last, np.int32),
        slots=tables[..., last // kv.page_size].reshape(-1) * np.int32(kv.page_size)
        + np.int32(last % kv.page_size),
        query_start=np.arange(sequences + 1, dtype=np.int32),
        context_lens=np.full(sequences, context, np.int32),
        page_table=tables.reshape(-1, tables.shape[2]),
        logit_rows=np.arange(sequences, dtype=np.int32),
    )


def prefill_batches(executor: Executor, sequences: int, length: int) -> list[StepBatch]:
    """All steps that prefill `sequences` prompts of `length` tokens, as many tokens a step as it
    takes; the last token of a prompt asks for logits."""
    most = executor.limits.max_num_tokens
    tables = _tables(executor, sequences, length, most)
    left = [(number, 0) for number in range(sequences)]
    steps = []
    while left:
        chunks, room = [], most
        while left and room:
            number, begin = left.pop(0)
            size = min(room, length - begin)
            chunks.append((number, begin, size))
            room -= size
            if begin + size < length:
                left.insert(0, (number, begin + size))
        steps.append(_chunk_batch(executor, tables, chunks, length))
    return steps


def pages_needed(kv: CacheLayout, sequences: int, length: int, step_tokens: int = 1) -> int:
    """Pages of the pool for `sequences` sequences of `length` tokens, of each of which a step
    computes at most `step_tokens`."""
    return sequences * sum(_held(kv, length, step_tokens))


def _held(kv: CacheLayout, length: int, step_tokens: int) -> list[int]:
    """Pages of a sequence in each group: of windows and states what a step reads and writes."""
    return [
        held_pages(length, kv.page_size, None if window is None else window + step_tokens)
        for window in kv.windows
    ]


def _tables(
    executor: Executor, sequences: int, length: int, step_tokens: int = 1
) -> "np.ndarray[tuple[int, ...], np.dtype[np.int32]]":
    """[groups of the cache layout, sequences, pages] of the pool; what windows and states have left
    is used again."""
    kv = executor.kv
    held = _held(kv, length, step_tokens)
    pages = np.random.default_rng(1).permutation(executor.num_pages)[: sequences * sum(held)]
    owned = np.split(pages.astype(np.int32), np.cumsum(np.multiply(held, sequences))[:-1])
    place = np.arange(kv.pages_for(length))
    return np.stack(
        [
            one.reshape(sequences, size)[:, place % size]
            for one, size in zip(owned, held, strict=True)
        ]
    )


def _chunk_batch(
    executor: Executor,
    tables: "np.ndarray[tuple[int, ...], np.dtype[np.int32]]",
    chunks: list[tuple[int, int, int]],
    length: int,
) -> StepBatch:
    size = executor.kv.page_size
    positions = np.concatenate([np.arange(begin, begin + n) for _, begin, n in chunks])
    owners = np.concatenate([np.full(n, number) for number, _, n in chunks])
    ends = np.cumsum([n for _, _, n in chunks])
    finished = [
        end - 1 for end, (_, begin, n) in zip(ends, chunks, strict=True) if begin + n == length
    ]
    return StepBatch(
        token_ids=np.random.default_rng(3).integers(
            0, executor.vocab_size, len(positions), np.int32
        ),
        positions=positions.astype(np.int32),
        slots=(tables[:, owners, positions // size] * size + positions % size)
        .reshape(-1)
        .astype(np.int32),
        query_start=np.concatenate([[0], ends]).astype(np.int32),
        context_lens=np.array([begin + n for _, begin, n in chunks], np.int32),
        page_table=tables[:, [number for number, _, _ in chunks]].reshape(-1, tables.shape[2]),
        logit_rows=np.array(finished, np.int32),
    )
