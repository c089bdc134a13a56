"""Runs an engine sequence by sequence, for accuracy and canaries: no scheduler, one sequence."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np

from trtc.protos.errors import RequestError
from trtc.protos.grammars import StoredGrammar
from trtc.protos.kv import CacheLayout
from trtc.protos.manifest import Canary, Limits, read_manifest
from trtc.runtime.engine.session import open_session
from trtc.runtime.executors.base import Executor, Float32s, Int32s, StepBatch


class Probe:
    """Implements the builder's EngineProbe.

    An engine under construction is opened without hashing: this process has just written it, and
    hashes it when the manifest is written.
    """

    def __init__(self, num_threads: int | None = None) -> None:
        self._num_threads = num_threads

    def check_tokenizer(self, directory: Path) -> tuple[str, ...]:
        """Load and test a checkpoint's tokenizer and chat template in processes with limits."""
        from trtc.runtime.text.tokenizer_trial import try_tokenizer

        return try_tokenizer(directory)

    def check_grammars(
        self, directory: Path, vocab_size: int, grammars: Mapping[str, StoredGrammar]
    ) -> None:
        """Compile grammars for a checkpoint's tokenizer, in processes with limits.

        Raises:
            RequestError: one cannot be compiled; `field` is its name.
        """
        from trtc.runtime.grammar.stored import try_grammars

        try_grammars(directory, vocab_size, grammars)

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
        """The greedy continuation of one prompt."""
        return next(self.canaries(engine, [prompt_ids], max_tokens)).token_ids

    def canaries(
        self, engine: Path, prompts: Sequence[Sequence[int]], max_tokens: int
    ) -> Iterator[Canary]:
        """The greedy continuation of every prompt, in order, with the margins of its tokens."""
        with closing(self._open(engine)) as executor:
            for prompt_ids in prompts:
                yield greedy_with_margins(executor, prompt_ids, max_tokens)

    def _open(self, engine: Path) -> Executor:
        manifest = read_manifest(engine)
        return open_session(
            engine,
            num_threads=self._num_threads,
            num_pages=pages_of_solo(manifest.kv, manifest.limits),
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
        rows = np.arange(len(chunk))
        yield executor.logits(solo_batch(executor, chunk, begin, rows, length=len(sequence)))


def greedy(executor: Executor, prompt_ids: Sequence[int], max_tokens: int) -> tuple[int, ...]:
    """Greedy continuation of one prompt; ties go to the lowest token id."""
    return greedy_with_margins(executor, prompt_ids, max_tokens).token_ids


def greedy_with_margins(executor: Executor, prompt_ids: Sequence[int], max_tokens: int) -> Canary:
    """The same, with the difference between the largest two logits of each token."""
    limits = executor.limits
    token_ids, done, margins = list(prompt_ids), 0, list[float]()
    longest = min(len(token_ids) + max_tokens, limits.max_seq_len + 1)
    while len(token_ids) < longest:
        length = len(token_ids)
        now = np.asarray(token_ids[done : done + limits.max_num_tokens], np.int32)
        last = np.array([len(now) - 1])
        logits = executor.logits(solo_batch(executor, now, done, last, length=length))
        done += len(now)
        if done == length:
            token_ids.append(int(np.argmax(logits[0])))
            second, best = np.partition(logits[0], -2)[-2:]
            margins.append(round(float(best) - float(second), 4))
            if limits.position_offset(length + 1) != limits.position_offset(length):
                done = 0  # the cached keys were rotated by the other rotary factors
    return Canary(
        prompt_ids=tuple(int(token) for token in prompt_ids),
        token_ids=tuple(token_ids[len(prompt_ids) :]),
        margins=tuple(margins),
    )


def pages_of_solo(kv: CacheLayout, limits: Limits) -> int:
    """Pages of a pool for one sequence of any length, if windows release no pages."""
    return len(kv.groups) * kv.pages_for(limits.max_seq_len)


def solo_batch(
    executor: Executor,
    chunk: Int32s,
    begin: int,
    logit_rows: object,
    *,
    length: int | None = None,
) -> StepBatch:
    """A step of one sequence alone in the pool, on its first pages in order.

    Args:
        length: tokens of the sequence, those of later steps included; None: up to this chunk.
    """
    kv = executor.kv
    end = begin + len(chunk)
    places = np.arange(begin, end, dtype=np.int32)
    # Each group has its own pages, as many as it could need.
    stride = kv.pages_for(executor.limits.max_seq_len) if len(kv.groups) > 1 else 0
    first = np.arange(len(kv.groups), dtype=np.int32).reshape(-1, 1) * np.int32(stride)
    offset = executor.limits.position_offset(end if length is None else length)
    return StepBatch(
        token_ids=chunk,
        positions=places + np.int32(offset),
        slots=(first * np.int32(kv.page_size) + places).reshape(-1),
        query_start=np.array([0, len(chunk)], np.int32),
        context_lens=np.array([end], np.int32),
        page_table=(first + np.arange(kv.pages_for(end))).astype(np.int32),
        logit_rows=np.asarray(logit_rows, np.int32),
    )
