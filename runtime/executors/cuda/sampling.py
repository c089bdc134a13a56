"""Draws a step's tokens on the device, in the stages that its rows need.

Only token ids are copied to the host, and log-probabilities if a row requests them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtc.plugins.sampling.tensors import (
    DRAW,
    DRAW_FILTERED,
    DRAWN_LOGPROBS,
    EDIT,
    LIKELIEST,
    MASK,
    TAKE_SAMPLED,
)
from trtc.protos.launch_plan import SamplingPlan, SamplingTensor
from trtc.protos.step import SPARSE_COLUMNS
from trtc.runtime.executors.base import Int32s
from trtc.runtime.executors.cuda.buckets import Bucket
from trtc.runtime.executors.cuda.device import Bytes, Download, Graph, Place, ProgramDevice
from trtc.runtime.executors.cuda.program import Program
from trtc.runtime.sampling.sampler import (
    NO_LOGPROBS,
    Logprobs,
    SampledTokens,
    SamplingBatch,
    counted,
    num_reported,
)

_SPARSE = tuple(
    (one.name, f"{one.name}_token_ids", f"{one.name}_{one.values}") for one in SPARSE_COLUMNS
)
"""Attribute of SamplingBatch -> the tensors of its token ids and values."""
_MASKS = "mask_words"
Send = Callable[[Bytes, Place], None]
"""`send` or `send_early` of a ProgramDevice."""


def stages_of(sampling: SamplingBatch, vocab_size: int) -> tuple[str, ...]:
    """The stages that a step needs; see plugins/sampling/tensors.py."""
    has_entries = bool(len(sampling.bias.rows) or len(sampling.seen.rows))
    edited = has_entries or sampling.pending is not None
    drawn = sampling.temperature > 0
    narrowed = sampling.narrowed(vocab_size)
    asked = bool((sampling.num_logprobs != NO_LOGPROBS).any())
    return (
        *((MASK,) if sampling.masks is not None else ()),
        *((LIKELIEST,) if asked else ()),
        *((EDIT,) if edited else ()),
        DRAW_FILTERED if bool((drawn & narrowed).any()) else DRAW,
        *((DRAWN_LOGPROBS,) if asked else ()),
    )


_TOKENS = ("sampled", "invalid")
_LOGPROBS = ("token_logprobs", "top_ids", "top_logprobs")
"""Tensors that are copied together, because they are contiguous."""


@dataclass(frozen=True)
class _Results:
    """A group of tensors being copied to the host."""

    download: Download
    tensors: Mapping[str, SamplingTensor]

    def wait(self) -> list[Int32s]:
        """Each tensor, [rows, columns]."""
        words = self.download.wait().view(np.int32)
        first = next(iter(self.tensors.values())).offset
        parts = []
        for tensor in self.tensors.values():
            begin = (tensor.offset - first) // 4
            part = words[begin : begin + tensor.rows * tensor.columns]
            parts.append(part.reshape(tensor.rows, tensor.columns))
        return parts


@dataclass(frozen=True)
class PendingTokens:
    """A step whose tokens are being copied to the host (implements PendingStep)."""

    tokens: _Results
    logprobs: _Results | None
    sampling: SamplingBatch
    vocab_size: int

    def wait(self) -> SampledTokens:
        rows, drafts = self.sampling.num_rows, self.sampling.drafts
        sampled, invalid = self.tokens.wait()
        return SampledTokens(
            sampled[:rows, 0].copy(),
            logprobs=None if self.logprobs is None else self._logprobs(self.logprobs),
            invalid_rows=tuple(np.flatnonzero(invalid[:rows, 0]).tolist()),
            counts=None if drafts is None else counted(sampled[:rows, 0], drafts),
        )

    def _logprobs(self, results: _Results) -> Logprobs:
        token, top_ids, top = results.wait()
        asked = np.flatnonzero(self.sampling.num_logprobs != NO_LOGPROBS)
        num_top = num_reported(self.sampling, self.vocab_size)[asked]
        most = int(self.sampling.num_logprobs[asked].max())
        return Logprobs(
            rows=asked.astype(np.int32),
            token=token.view(np.float32)[asked, 0],
            top_ids=top_ids[asked, :most],
            top=top.view(np.float32)[asked, :most],
            num_top=num_top,
        )


class DeviceSampler:
    """The sampler of one engine."""

    def __init__(self, program: Program, plan: SamplingPlan, vocab_size: int) -> None:
        self._program = program
        self._device: ProgramDevice = program.device
        self._plan = plan
        self._vocab_size = vocab_size
        self._graphs: dict[tuple[int, tuple[str, ...]], Graph] = {}

    def fits(self, sampling: SamplingBatch) -> bool:
        """Whether the device has room for the rows' biases, seen tokens and masks."""
        masked = 0 if sampling.masks is None else len(sampling.masks.rows)
        return masked <= self._plan.tensors[_MASKS].rows and all(
            len(getattr(sampling, name).rows) <= self._plan.tensors[token_ids].rows
            for name, token_ids, _ in _SPARSE
        )

    def send(self, sampling: SamplingBatch, send: Send) -> None:
        """Send the sparse lists and masks, if there are any."""
        for name, token_ids, values in _SPARSE:
            entries = getattr(sampling, name)
            if len(entries.rows):
                self._put(token_ids, entries.token_ids, send)
                self._put(values, entries.values, send)
        if sampling.masks is not None:
            self._put(_MASKS, sampling.masks.words, send)

    def draw(self, bucket: Bucket, sampling: SamplingBatch) -> PendingTokens:
        """Enqueue the stages and the download; their inputs must have been sent."""
        stages = stages_of(sampling, self._vocab_size)
        key = (bucket.rows, stages)
        if key in self._graphs:
            self._graphs[key].replay()
        else:
            self._run(stages, bucket)
            self._graphs[key] = self._device.capture(lambda: self._run(stages, bucket))
        return PendingTokens(
            tokens=self._fetch(_TOKENS),
            logprobs=self._fetch(_LOGPROBS) if LIKELIEST in stages else None,
            sampling=sampling,
            vocab_size=self._vocab_size,
        )

    def take_sampled(self, bucket: Bucket) -> None:
        """Copy tokens of the last step to the inputs that refer to them by `token_sources`."""
        self._run((TAKE_SAMPLED,), bucket)

    def sampled(self) -> Int32s:
        """Tokens drawn by the last step, for the maximum number of rows; blocks."""
        tensor = self._plan.tensors["sampled"]
        return self._device.fetch(self._at("sampled"), 4 * tensor.rows).wait().view(np.int32)

    def put(self, token_ids: Int32s) -> None:
        """Store tokens of the last step that were drawn on the host."""
        self._put("sampled", token_ids, self._device.send)

    def _put(self, tensor: str, values: NDArray[Any], send: Send) -> None:
        flat = np.ascontiguousarray(values).reshape(-1)
        send(flat.view(np.uint8), self._at(tensor))

    def _run(self, stages: tuple[str, ...], bucket: Bucket) -> None:
        for stage in stages:
            for call in self._plan.stages[stage]:
                self._program.launch(call, bucket)

    def _fetch(self, names: tuple[str, ...]) -> _Results:
        tensors = {name: self._plan.tensors[name] for name in names}
        last = tensors[names[-1]]
        end = last.offset + 4 * last.rows * last.columns
        first = tensors[names[0]].offset
        return _Results(self._device.fetch(self._at(names[0]), end - first), tensors)

    def _at(self, tensor: str) -> Place:
        return Place(self._program.spaces["sampling"], self._plan.tensors[tensor].offset)
