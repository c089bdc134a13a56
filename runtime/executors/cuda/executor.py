"""Runs a CUDA engine: a step is one upload, one graph, one download.

    StepBatch -> step block -> graph of its bucket -> graph of the sampler -> token ids
                 (one copy)    (up to the logits)     (the stages it needs)    (one copy)

A step that is drawn late sends its block without the sampling columns. They follow with the masks
on a copy stream, while the layers run:

    StepBatch -> step block -> graph of its bucket ──────────┬─> graph of the sampler -> token ids
            SamplingBatch -> its part of the block, masks ───┘

Pending token ids, drawn by the last step and unknown to the host, are copied on the device.

A bucket's graph is captured at its first step: there is no warm-up at load, and a capture costs
milliseconds once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from trtc.protos.kv import CacheLayout
from trtc.protos.launch_plan import StepBlock
from trtc.protos.manifest import Limits
from trtc.runtime.executors.base import (
    Bytes,
    DraftRows,
    ExecutorSizes,
    Float32s,
    PageRead,
    PendingStep,
    StepBatch,
    UndrawnStep,
)
from trtc.runtime.executors.cuda.buckets import Bucket, Buckets
from trtc.runtime.executors.cuda.device import Download, Graph, Place, ProgramDevice, Span
from trtc.runtime.executors.cuda.program import CudaEngineFiles, Program
from trtc.runtime.executors.cuda.sampling import DeviceSampler
from trtc.runtime.executors.cuda.step_inputs import fill_sampling, fill_step, sampling_part
from trtc.runtime.executors.states import replaced_states
from trtc.runtime.sampling.pending import with_pending_counted
from trtc.runtime.sampling.sampler import SampledTokens, SamplingBatch, sample

_MOVED_BYTES = 16 << 20
"""Bytes of pages in one page-locked buffer; at most two are in flight."""
_MOST_DRAFT_ROWS = 64
"""Steps of up to this many decodes take little longer than one decode: most of the time is for
reading the weights."""


@dataclass(frozen=True)
class _Drawn:
    """A step whose tokens have been drawn on the host."""

    tokens: SampledTokens

    def wait(self) -> SampledTokens:
        return self.tokens


@dataclass(frozen=True, eq=False)
class _Undrawn:
    """A step whose logits are computed (implements UndrawnStep)."""

    executor: "CudaExecutor"
    bucket: Bucket

    def draw(self, sampling: SamplingBatch) -> PendingStep:
        return self.executor.draw(self.bucket, sampling)


@dataclass(frozen=True, eq=False)
class _PageRead:
    """Copies of pages in flight (implements PageRead)."""

    downloads: list[Download]
    page_bytes: int

    def wait(self) -> Bytes:
        parts = [one.wait() for one in self.downloads] or [np.empty(0, np.uint8)]
        return np.concatenate(parts).reshape(-1, self.page_bytes)


class CudaExecutor(ExecutorSizes):
    """An opened CUDA engine with its KV pool (implements Executor)."""

    def __init__(
        self,
        files: CudaEngineFiles,
        device: ProgramDevice,
        *,
        limits: Limits,
        kv: CacheLayout,
        vocab_size: int,
        num_pages: int,
    ) -> None:
        """Load the code and the weights and allocate everything a step needs.

        Raises:
            EnvironmentFault: the GPU has too little memory, or its driver refuses the code.
        """
        self._program = Program(files, device, kv=kv, vocab_size=vocab_size, num_pages=num_pages)
        self._device = device
        super().__init__(limits, kv, vocab_size, num_pages)
        self._layout = files.launches.step
        launches = files.launches
        self._buckets = Buckets(
            limits, launches.split_keys, launches.max_splits, self._layout.max_rows
        )
        self._block = np.zeros(self._layout.num_elements, np.int32)
        self._sampler = DeviceSampler(self._program, files.launches.sampling, vocab_size)
        self._graphs: dict[Bucket, Graph] = {}
        self._closed = False

    @property
    def program(self) -> Program:
        """The program, for measuring and checking single calls."""
        return self._program

    @property
    def layout(self) -> StepBlock:
        """Layout of the step's inputs on the device."""
        return self._layout

    def bucket_of(self, batch: StepBatch) -> Bucket:
        """The bucket whose graph runs a step."""
        return self._buckets.of(
            num_tokens=len(batch.token_ids),
            num_sequences=len(batch.context_lens),
            num_rows=len(batch.logit_rows),
            longest_context=int(batch.context_lens.max()),
        )

    @property
    def runs_ahead(self) -> bool:
        return True

    @property
    def counts_pending(self) -> bool:
        return True

    @property
    def draft_rows(self) -> DraftRows | None:
        most = min(self._layout.max_rows, _MOST_DRAFT_ROWS)
        return DraftRows(most, as_sequences=True) if most > 1 else None

    def launch(self, batch: StepBatch, sampling: SamplingBatch) -> PendingStep:
        if not self._sampler.fits(sampling):
            return self.launch_forward(batch).draw(sampling)
        fill_sampling(self._block, self._layout, sampling)
        self._sampler.send(sampling, self._device.send)
        return self._sampler.draw(self._step(batch), sampling)

    def launch_forward(self, batch: StepBatch) -> UndrawnStep:
        return _Undrawn(self, self._step(batch))

    def draw(self, bucket: Bucket, sampling: SamplingBatch) -> PendingStep:
        """Draw the last step that was launched up to its logits, which has this bucket.

        Columns and masks are copied while the layers run: the layers do not read them, and the
        draws before, which do, are complete.
        """
        if not self._sampler.fits(sampling):
            return self._draw_on_host(sampling)
        fill_sampling(self._block, self._layout, sampling)
        part = sampling_part(self._layout)
        target = Place(self._program.spaces["step"], 4 * part.start)
        self._device.send_early(self._block[part].view(np.uint8), target)
        self._sampler.send(sampling, self._device.send_early)
        return self._sampler.draw(bucket, sampling)

    def _draw_on_host(self, sampling: SamplingBatch) -> PendingStep:
        """Draw a step with more biases, penalties or masks than the device has room for.

        Blocks until the tokens are on the device, where the next step reads them.
        """
        if sampling.pending is not None:
            sampling = with_pending_counted(sampling, self._sampler.sampled())
        logits = self._fetch_logits(sampling.num_rows).wait().view(np.float32)
        tokens = sample(logits.reshape(sampling.num_rows, self._vocab_size), sampling)
        self._sampler.put(tokens.token_ids)
        return _Drawn(tokens)

    def logits(self, batch: StepBatch) -> Float32s:
        """See Executor. If there are more rows than a step supports, several steps run, which write
        the same keys and values again and start from the same states."""
        result = np.empty((len(batch.logit_rows), self._vocab_size), np.float32)
        replaced = replaced_states(self._kv, batch) if len(result) > self._layout.max_rows else []
        states = self.read_pages(replaced).wait() if replaced else None
        # A step without logits is run too, for its keys and values.
        for begin in range(0, max(1, len(result)), self._layout.max_rows):
            rows = slice(begin, begin + self._layout.max_rows)
            wanted = batch.logit_rows[rows]
            if begin and states is not None:
                self.write_pages(replaced, states)
            self._step(replace(batch, logit_rows=wanted))
            if len(wanted):
                logits = self._fetch_logits(len(wanted)).wait().view(np.float32)
                result[rows] = logits.reshape(len(wanted), self._vocab_size)
        return result

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        pool = self._program.spaces["pool"]
        for begin, size in zip(self._program.regions, self._kv.region_bytes, strict=True):
            for source, target in zip(sources, targets, strict=True):
                self._device.copy(
                    Place(pool, begin + source * size), Place(pool, begin + target * size), size
                )

    @property
    def moves_pages(self) -> bool:
        return True

    @property
    def keeps_weights(self) -> bool:
        return True

    def weights_on_host(self) -> Bytes:
        return self._program.weights_on_host()

    def read_pages(self, pages: Sequence[int]) -> PageRead:
        downloads: list[Download] = []
        for batch in self._in_batches(pages):
            if len(downloads) > 1:
                downloads[-2].wait()  # frees its buffer for this one
            downloads.append(self._device.gather(self._spans(batch)))
        return _PageRead(downloads, self._kv.page_bytes)

    def write_pages(self, pages: Sequence[int], data: Bytes) -> None:
        begin = 0
        for batch in self._in_batches(pages):
            rows = data[begin : begin + len(batch)]
            self._device.scatter(rows.reshape(-1), self._spans(batch))
            begin += len(batch)

    def _in_batches(self, pages: Sequence[int]) -> Iterator[Sequence[int]]:
        number = max(1, _MOVED_BYTES // self._kv.page_bytes)
        for begin in range(0, len(pages), number):
            yield pages[begin : begin + number]

    def _spans(self, pages: Sequence[int]) -> list[Span]:
        """For each page, its rows of all regions."""
        pool = self._program.spaces["pool"]
        rows = list(zip(self._program.regions, self._kv.region_bytes, strict=True))
        return [
            Span(Place(pool, begin + page * size), size) for page in pages for begin, size in rows
        ]

    def check(self) -> None:
        """Nothing to check: failures of a GPU are reported when it is used."""

    def abandon(self) -> None:
        """See ProgramDevice.abandon."""
        self._device.abandon()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._graphs.clear()
            self._program.close()

    def _step(self, batch: StepBatch) -> Bucket:
        """Enqueue a step up to its logits."""
        bucket = self.bucket_of(batch)
        end = fill_step(self._block, self._layout, batch, bucket.sequences)
        self._device.send(self._block[:end].view(np.uint8), Place(self._program.spaces["step"], 0))
        graph = self._graphs.get(bucket)
        if graph is None:
            self._run(bucket)
            self._graphs[bucket] = self._device.capture(lambda: self._run(bucket))
        else:
            graph.replay()
        return bucket

    def _run(self, bucket: Bucket) -> None:
        self._sampler.take_sampled(bucket)
        self._program.run(bucket)

    def _fetch_logits(self, num_rows: int) -> Download:
        logits = Place(self._program.spaces["logits"], 0)
        return self._device.fetch(logits, 4 * num_rows * self._vocab_size)
