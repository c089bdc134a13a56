"""Open an engine: verify everything, then map weights and load code.

    manifest -> versions -> instruction set -> memory -> sizes -> hashes -> map, load

Nothing of the engine is mapped or executed before the last arrow.
"""

import hashlib
import mmap
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trtc.plugins.cpu.host import object_file, runnable_isas
from trtc.protos.errors import (
    EngineCorruptError,
    EngineIncompatibleError,
    EnvironmentFault,
    RequestError,
)
from trtc.protos.manifest import (
    PLAN_FILE,
    TOKENIZER_DIR,
    WEIGHTS_FILE,
    KvGeometry,
    Limits,
    Manifest,
    read_manifest,
)
from trtc.protos.plan import read_plan
from trtc.runtime.dummy_weights import fill_weights
from trtc.runtime.executors.base import Executor
from trtc.runtime.executors.cpu import CpuEngineFiles, CpuExecutor
from trtc.runtime.machine import available_bytes, num_usable_cores
from trtc.runtime.tokenizer import Tokenizer
from trtc.runtime.verify import REBUILD, verify_files

_DEFAULT_POOL_SHARE = 0.5
"""Of the memory left beside weights and activations, when no pool size is given."""
_ALIGNMENT = 64


@dataclass(frozen=True)
class Session:
    """An engine that is ready to run. Close it to free the pool."""

    path: Path
    manifest: Manifest
    executor: Executor
    tokenizer: Tokenizer | None
    """None: the checkpoint had none, and the engine takes token ids only."""

    def close(self) -> None:
        self.executor.close()


def open_session(
    engine: Path,
    *,
    num_threads: int | None = None,
    kv_bytes: int | None = None,
    num_pages: int | None = None,
    dummy_weights: bool = False,
    verify: bool = True,
) -> Session:
    """Verify an engine and load it.

    Args:
        engine: directory written by `trtc build`.
        num_threads: of the kernels; None: the physical cores that this process may use.
        kv_bytes: memory of the KV pool; None: what `num_pages` needs.
        num_pages: pages of the KV pool; None with kv_bytes None: enough for max_batch_size
            sequences of max_seq_len, at most half of the memory that is free.
        dummy_weights: fill in random weights, for an engine that was built without any.
        verify: False skips the hashes (not the sizes) of files whose integrity is known.

    Raises:
        EngineCorruptError: a file is missing, or differs from the manifest.
        EngineIncompatibleError: the engine is of another version or for another machine.
        EnvironmentFault: too little memory, or the code does not load.
        RequestError: a contradictory or impossible argument.
    """
    manifest = read_manifest(engine)
    isa = _pick_isa(manifest)
    _check_dummy(manifest, dummy_weights)
    pages = _num_pages(manifest, kv_bytes, num_pages)
    if num_threads is not None and num_threads < 1:
        raise RequestError(f"is {num_threads}", field="--threads", remedy="Give 1 or more")
    _check_listed(manifest)
    verify_files(engine, manifest, hashes=verify)
    plan_path = engine / PLAN_FILE
    executor = CpuExecutor(
        CpuEngineFiles(
            shared_object=engine / object_file(isa),
            weights=_dummy(plan_path)
            if dummy_weights
            else map_weights(engine / WEIGHTS_FILE, manifest.ledger.weights),
            plan_digest=hashlib.sha256(plan_path.read_bytes()).hexdigest(),
        ),
        limits=manifest.limits,
        kv=manifest.kv,
        vocab_size=manifest.model.vocab_size,
        num_pages=pages,
        num_threads=num_usable_cores() if num_threads is None else num_threads,
    )
    tokenizer = Tokenizer.load(engine / TOKENIZER_DIR) if manifest.has_tokenizer else None
    return Session(path=engine, manifest=manifest, executor=executor, tokenizer=tokenizer)


def pages_per_sequence(kv: KvGeometry, limits: Limits) -> int:
    return -(-limits.max_seq_len // kv.page_size)


def _pick_isa(manifest: Manifest) -> str:
    """The best level that the engine has and this machine runs."""
    if manifest.target.kind != "cpu":
        raise EngineIncompatibleError(
            f"is {manifest.target.kind}, which this trtc cannot run",
            field="manifest.json: target.kind",
            remedy="Serve it where that device is, or build with --target cpu",
        )
    runnable = runnable_isas()
    for isa in runnable:
        if isa in manifest.target.archs:
            return isa
    raise EngineIncompatibleError(
        f"the engine has code for {', '.join(manifest.target.archs)}, "
        f"this machine runs {', '.join(runnable)}",
        field="manifest.json: target.archs",
        remedy=f"Build with --target cpu:{runnable[0]}",
    )


def _check_dummy(manifest: Manifest, dummy_weights: bool) -> None:
    if manifest.dummy_weights and not dummy_weights:
        raise EngineIncompatibleError(
            "the engine was built without weights",
            field="manifest.json: dummy_weights",
            remedy="Give --dummy-weights to run it with random ones",
        )
    if dummy_weights and not manifest.dummy_weights:
        raise RequestError(
            "the engine has weights of its own", field="--dummy-weights", remedy="Leave it out"
        )


def _num_pages(manifest: Manifest, kv_bytes: int | None, num_pages: int | None) -> int:
    page_bytes = manifest.kv.page_bytes
    if kv_bytes is not None and num_pages is not None:
        raise RequestError("give either a size or a number of pages", field="--kv-bytes")
    if kv_bytes is not None:
        num_pages = kv_bytes // page_bytes
    free = available_bytes() - manifest.ledger.activations
    if manifest.dummy_weights:
        free -= manifest.ledger.weights
    if num_pages is None:
        wanted = manifest.limits.max_batch_size * pages_per_sequence(manifest.kv, manifest.limits)
        num_pages = min(wanted, int(free * _DEFAULT_POOL_SHARE) // page_bytes)
        if num_pages < 1:
            raise EnvironmentFault(
                f"{max(0, free) / 1e6:.0f} MB are free, too little for a KV pool",
                remedy="Free some memory",
            )
    if num_pages < 1:
        raise RequestError(
            f"holds no page of {page_bytes} bytes", field="--kv-bytes", remedy="Give a larger pool"
        )
    if num_pages * page_bytes > free:
        raise EnvironmentFault(
            f"a pool of {num_pages * page_bytes / 1e9:.2f} GB does not fit the "
            f"{max(0, free) / 1e9:.2f} GB that are free",
            field="--kv-bytes",
            remedy="Give a smaller pool",
        )
    return num_pages


def _check_listed(manifest: Manifest) -> None:
    """A file that the manifest leaves out would be loaded without having been verified."""
    needed = [PLAN_FILE, *(object_file(isa) for isa in manifest.target.archs)]
    if not manifest.dummy_weights:
        needed.append(WEIGHTS_FILE)
    for name in needed:
        if name not in manifest.files:
            raise EngineCorruptError("is not listed", field=f"manifest.json: files.{name}")


def map_weights(path: Path, num_bytes: int) -> NDArray[np.uint8]:
    """The data section of weights.safetensors, mapped and not copied.

    Raises:
        EngineCorruptError: the data section is not `num_bytes` long, or not aligned.
    """
    with path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    begin = 8 + int.from_bytes(mapping[:8], "little")
    if begin % _ALIGNMENT or len(mapping) - begin != num_bytes:
        raise EngineCorruptError(
            f"the data section is {len(mapping) - begin} bytes at {begin}, not "
            f"{num_bytes} at a multiple of {_ALIGNMENT}",
            field=str(path),
            remedy=REBUILD,
        )
    return np.frombuffer(mapping, np.uint8, offset=begin)


def _dummy(plan_path: Path) -> NDArray[np.uint8]:
    plan = read_plan(plan_path)
    return fill_weights(plan.weights, plan.weights_bytes)
