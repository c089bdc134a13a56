"""Runs an engine sequence by sequence, for accuracy and canaries: no scheduler, one sequence."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np

from trtc.protos.errors import RequestError
from trtc.protos.manifest import read_manifest
from trtc.runtime.executors.base import Executor, Float32s, Int32s, StepBatch
from trtc.runtime.session import open_session, pages_per_sequence


class Probe:
    """Implements the builder's EngineProbe.

    An engine under construction is opened without hashing: it was written by this very process,
    and is hashed when it is sealed.
    """

    def __init__(self, num_threads: int | None = None) -> None:
        self._num_threads = num_threads

    def logits(self, engine: Path, sequences: Sequence[Int32s]) -> Iterator[Float32s]:
        """Logits [len, vocab] of every sequence, in order.

        Raises:
            RequestError: a sequence is empty or longer than the engine's max_seq_len.
        """
        with closing(self._open(engine)) as executor:
            for sequence in sequences:
                logits = np.empty((len(sequence), executor.vocab_size), np.float32)
                begin = 0
                for chunk in sequence_logits(executor, sequence):
                    logits[begin : begin + len(chunk)] = chunk
                    begin += len(chunk)
                yield logits

    def greedy(self, engine: Path, prompt_ids: Sequence[int], max_tokens: int) -> tuple[int, ...]:
        with closing(self._open(engine)) as executor:
            return greedy(executor, prompt_ids, max_tokens)

    def _open(self, engine: Path) -> Executor:
        manifest = read_manifest(engine)
        return open_session(
            engine,
            num_threads=self._num_threads,
            num_pages=pages_per_sequence(manifest.kv, manifest.limits),
            dummy_weights=manifest.dummy_weights,
            verify=False,
        ).executor


def sequence_logits(executor: Executor, sequence: Int32s) -> Iterator[Float32s]:
    """Logits of every position, in chunks of at most max_num_tokens rows."""
    limits = executor.limits
    if not 1 <= len(sequence) <= limits.max_seq_len:
        raise RequestError(
            f"has {len(sequence)} tokens, the engine takes 1 to {limits.max_seq_len}",
            field="sequence",
        )
    for begin in range(0, len(sequence), limits.max_num_tokens):
        chunk = np.asarray(sequence[begin : begin + limits.max_num_tokens], np.int32)
        yield executor.logits(solo_batch(executor, chunk, begin, np.arange(len(chunk))))


def greedy(executor: Executor, prompt_ids: Sequence[int], max_tokens: int) -> tuple[int, ...]:
    """Greedy continuation of one prompt; ties go to the lowest token id."""
    limits = executor.limits
    chunk = np.asarray(prompt_ids, np.int32)
    done, tokens = 0, list[int]()
    while len(tokens) < max_tokens and done + len(chunk) <= limits.max_seq_len:
        now, chunk = chunk[: limits.max_num_tokens], chunk[limits.max_num_tokens :]
        logits = executor.logits(solo_batch(executor, now, done, np.array([len(now) - 1])))
        done += len(now)
        if len(chunk) == 0:
            tokens.append(int(np.argmax(logits[0])))
            chunk = np.array(tokens[-1:], np.int32)
    return tuple(tokens)


def solo_batch(executor: Executor, chunk: Int32s, begin: int, logit_rows: object) -> StepBatch:
    """A step of one sequence alone in the pool, on its first pages in order."""
    page_size = executor.kv.page_size
    positions = np.arange(begin, begin + len(chunk), dtype=np.int32)
    num_pages = -(-(begin + len(chunk)) // page_size)
    return StepBatch(
        token_ids=chunk,
        positions=positions,
        slots=positions,
        query_start=np.array([0, len(chunk)], np.int32),
        context_lens=np.array([begin + len(chunk)], np.int32),
        page_table=np.arange(num_pages, dtype=np.int32)[None],
        logit_rows=np.asarray(logit_rows, np.int32),
    )
