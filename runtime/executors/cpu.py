"""Runs a compiled CPU engine: one foreign call per step, which releases the GIL."""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trtc.protos.errors import (
    EngineCorruptError,
    EngineIncompatibleError,
    EnvironmentFault,
    InvariantError,
)
from trtc.protos.kv import CacheLayout
from trtc.protos.manifest import STEP_ABI_VERSION, Limits
from trtc.protos.step import GRAPH_INPUTS
from trtc.runtime.executors.base import (
    Bytes,
    DraftRows,
    ExecutorSizes,
    Float32s,
    Int32s,
    Landed,
    PageRead,
    PendingStep,
    StepBatch,
    UndrawnStep,
)
from trtc.runtime.executors.cpu_pool import KvPool
from trtc.runtime.executors.native_code import load_code
from trtc.runtime.sampling.sampler import SampledTokens, SamplingBatch, sample

_INVALID_ARGUMENT = 1
_MOST_AHEAD = 1 << 28
"""Most bytes of the KV pool that are touched ahead of their use: enough for a burst before the
touching thread runs again; for small models at most a third of the weights."""
_MOST_DRAFT_ROWS = 16
"""More rows cost more time than drafts save."""

Float64s = NDArray[np.float64]


class _Info(ctypes.Structure):
    """trtc_engine_info_t"""

    _fields_ = (
        ("abi_version", ctypes.c_int32),
        ("isa", ctypes.c_char_p),
        ("plan_digest", ctypes.c_char_p),
        ("weights_bytes", ctypes.c_int64),
        ("arena_bytes", ctypes.c_int64),
    )


class _Options(ctypes.Structure):
    """trtc_engine_options_t"""

    _fields_ = (
        ("weights", ctypes.c_void_p),
        ("weights_bytes", ctypes.c_int64),
        ("num_threads", ctypes.c_int32),
        ("num_cpus", ctypes.c_int32),
        ("cpus", ctypes.c_void_p),
        ("fault_message", ctypes.c_char_p),
        ("fault_status", ctypes.c_int32),
    )


class _Step(ctypes.Structure):
    """trtc_engine_step_t"""

    _fields_ = (
        *((one.name, ctypes.c_void_p) for one in GRAPH_INPUTS),
        ("num_tokens", ctypes.c_int64),
        ("num_sequences", ctypes.c_int64),
        ("num_logit_rows", ctypes.c_int64),
        ("page_table_width", ctypes.c_int64),
        ("pools", ctypes.c_void_p),
        ("num_pages", ctypes.c_int64),
        ("logits", ctypes.c_void_p),
        ("only_largest", ctypes.c_int64),
    )


class CpuEngineFiles(NamedTuple):
    """Verified files of an engine."""

    shared_object: Path
    weights: NDArray[np.uint8]
    """Data section of weights.safetensors (mapped), or dummy weights; 64-byte aligned."""
    plan_digest: str
    """SHA-256 of plan.json, which must equal the one in the compiled code."""
    weights_path: Path | None = None
    """The file that `weights` are mapped from; None: they are memory of this process."""
    code_sha256: str | None = None
    """SHA-256 of the shared object; None: any content is accepted."""


class _Done(NamedTuple):
    """A finished step: this executor computes when it is launched."""

    tokens: SampledTokens

    def wait(self) -> SampledTokens:
        return self.tokens


class _Computed(NamedTuple):
    """The logits of a step, which the next one overwrites."""

    logits: Float32s

    def draw(self, sampling: SamplingBatch) -> PendingStep:
        return _Done(sample(self.logits, sampling))


class CpuExecutor(ExecutorSizes):
    """An opened CPU engine with its KV pool (implements Executor)."""

    def __init__(
        self,
        files: CpuEngineFiles,
        *,
        limits: Limits,
        kv: CacheLayout,
        vocab_size: int,
        num_pages: int,
        num_threads: int,
        cpus: Sequence[int] = (),
        quick_start: bool = False,
    ) -> None:
        """Open the shared object and allocate the pool.

        Args:
            num_pages: pages of the pool; the system commits its memory on first access.
            cpus: logical CPU of each thread, for pinning; empty: no pinning.
            quick_start: whether to touch no pages of the pool before the first step.

        Raises:
            EngineCorruptError: the shared object cannot be read, or is not the one of the manifest.
            EngineIncompatibleError: it belongs to another plan.
            EnvironmentFault: the object cannot be loaded, or memory or threads ran out.
        """
        super().__init__(limits, kv, vocab_size, num_pages)
        self._weights = files.weights
        self._library = _open_library(files)
        self._pool = KvPool(kv, num_pages, min(_MOST_AHEAD, files.weights.nbytes // 3))
        cpu_array = np.asarray(cpus, np.int32)
        options = _Options(
            weights=files.weights.ctypes.data,
            weights_bytes=files.weights.nbytes,
            num_threads=num_threads,
            num_cpus=len(cpu_array),
            cpus=cpu_array.ctypes.data,
            fault_message=_fault_message(files.weights_path),
            fault_status=EngineCorruptError.exit_code,
        )
        self._engine: int | None = self._library.trtc_engine_create(ctypes.byref(options))
        if not self._engine:
            raise EnvironmentFault(
                f"the engine did not start: {self._last_error()}",
                field=str(files.shared_object),
                remedy="Use fewer threads or free some memory",
            )
        self._logits_buffer = np.empty((0, vocab_size), np.float32)
        if not quick_start:
            self._pool.touch_ahead(0)

    @property
    def runs_ahead(self) -> bool:
        return False

    @property
    def counts_pending(self) -> bool:
        return False

    @property
    def draft_rows(self) -> DraftRows:
        return DraftRows(most=_MOST_DRAFT_ROWS, as_sequences=False)

    def launch(self, batch: StepBatch, sampling: SamplingBatch) -> PendingStep:
        logits = self._room_for_logits(len(batch.logit_rows))
        self._step(batch, logits, only_largest=sampling.only_largest)
        return _Done(sample(logits, sampling))

    def launch_forward(self, batch: StepBatch) -> UndrawnStep:
        logits = self._room_for_logits(len(batch.logit_rows))
        self._step(batch, logits)
        return _Computed(logits)

    def _room_for_logits(self, rows: int) -> Float32s:
        if len(self._logits_buffer) < rows:
            self._logits_buffer = np.empty((rows, self._vocab_size), np.float32)
        return self._logits_buffer[:rows]

    def logits(self, batch: StepBatch) -> Float32s:
        result = np.empty((len(batch.logit_rows), self._vocab_size), np.float32)
        self._step(batch, result)
        return result

    def time_calls(self, batch: StepBatch, num_calls: int) -> Float64s:
        """Run a greedy step and return the seconds of each of the plan's calls, for profiles."""
        logits = np.empty((len(batch.logit_rows), self._vocab_size), np.float32)
        seconds = np.zeros(num_calls, np.float64)
        self._step(batch, logits, only_largest=True, seconds=seconds)
        return seconds

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._pool.copy_pages(sources, targets)

    @property
    def moves_pages(self) -> bool:
        return True

    @property
    def keeps_weights(self) -> bool:
        return True

    def weights_on_host(self) -> Bytes:
        """The weights, not copied: mapped from their file, unless they are random."""
        return self._weights

    def read_pages(self, pages: Sequence[int]) -> PageRead:
        return Landed(self._pool.read_pages(pages))

    def write_pages(self, pages: Sequence[int], data: Bytes) -> None:
        self._pool.write_pages(pages, data)

    def check(self) -> None:
        """Nothing to check: the device is this process."""

    def close(self) -> None:
        if self._engine:
            self._library.trtc_engine_destroy(self._engine)
            self._engine = None
            self._pool.close()
            self._weights = np.empty(0, np.uint8)

    def _step(
        self,
        batch: StepBatch,
        logits: Float32s,
        *,
        only_largest: bool = False,
        seconds: Float64s | None = None,
    ) -> None:
        """Run a step and write its logits and, into `seconds`, the time of each call. With
        `only_largest`, only the largest logit of each row must be correct."""
        if self._engine is None:
            raise InvariantError("the executor is closed")
        groups = max(1, len(self._kv.groups))
        tokens, sequences = len(batch.token_ids), len(batch.context_lens)
        if (len(batch.slots), len(batch.page_table)) != (groups * tokens, groups * sequences):
            raise InvariantError("a step's slots or page tables are not those of every cache group")
        # Kept in a list, so that arrays made contiguous here outlive the call.
        arrays = [_contiguous(getattr(batch, one.name)) for one in GRAPH_INPUTS]
        step = _Step(
            *(array.ctypes.data for array in arrays),
            len(batch.token_ids),
            len(batch.context_lens),
            len(batch.logit_rows),
            batch.page_table.shape[1],
            self._pool.pointers.ctypes.data,
            self._num_pages,
            logits.ctypes.data,
            int(only_largest),
        )
        if seconds is None:
            status = self._library.trtc_engine_step(self._engine, ctypes.byref(step))
        else:
            status = self._library.trtc_engine_time_calls(
                self._engine, ctypes.byref(step), seconds.ctypes.data, len(seconds)
            )
        if status == _INVALID_ARGUMENT:
            raise InvariantError(f"the engine refused a step: {self._last_error()}")
        if status:
            raise EnvironmentFault(f"the engine failed: {self._last_error()}")
        self._pool.touch_ahead(int(batch.slots.max()) // self._kv.page_size + 1)

    def _last_error(self) -> str:
        text: bytes = self._library.trtc_engine_last_error()
        return text.decode(errors="replace")


def _fault_message(weights: Path | None) -> bytes | None:
    """The message with which the process ends if mapped weights become unreadable (SIGBUS)."""
    if weights is None:
        return None
    error = EngineCorruptError(
        "was truncated or became unreadable while it was in use",
        field=str(weights)[-300:],
        remedy="Copy the engine again from where it was built",
    )
    return f"trtc: error: {error}".encode(errors="replace")


def _contiguous(array: Int32s) -> Int32s:
    return np.ascontiguousarray(array, np.int32)


def _open_library(files: CpuEngineFiles) -> ctypes.CDLL:
    library = load_code(files.shared_object, files.code_sha256)
    try:
        library.trtc_engine_info.restype = ctypes.POINTER(_Info)
        library.trtc_engine_last_error.restype = ctypes.c_char_p
        library.trtc_engine_create.restype = ctypes.c_void_p
        library.trtc_engine_step.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        library.trtc_engine_time_calls.argtypes = (
            *(ctypes.c_void_p,) * 3,
            ctypes.c_int64,
        )
        library.trtc_engine_destroy.argtypes = (ctypes.c_void_p,)
        library.trtc_engine_destroy.restype = None
    except AttributeError as error:
        raise EnvironmentFault(
            f"cannot be loaded ({error})",
            field=str(files.shared_object),
            remedy="Build the engine on this machine",
        ) from error
    info: _Info = library.trtc_engine_info().contents
    for field, found, expected in (
        ("abi_version", info.abi_version, STEP_ABI_VERSION),
        ("plan_digest", info.plan_digest.decode(), files.plan_digest),
        ("weights_bytes", info.weights_bytes, files.weights.nbytes),
    ):
        if found != expected:
            raise EngineIncompatibleError(
                f"the compiled code has {found}, the engine says {expected}",
                field=f"{files.shared_object.name}: {field}",
                remedy="Build the engine again",
            )
    return library
