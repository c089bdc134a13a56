"""Open an engine: verify everything, then map weights and load code.

    manifest -> versions -> sizes -> machine -> memory -> hashes -> map, load

Nothing of the engine is mapped or executed before the last arrow. Only weights, which are data, may
be hashed after it, by a caller that returns no result until they are. Hashing starts once the sizes
are checked, in parallel with the checks of the machine, which may import libraries for seconds.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import msgspec

from trtc.protos.errors import (
    EngineCorruptError,
    EngineIncompatibleError,
    EngineUntrustedError,
    EnvironmentFault,
    RequestError,
)
from trtc.protos.grammars import StoredGrammar, read_grammars
from trtc.protos.manifest import (
    MANIFEST_FILE,
    PLAN_FILE,
    TOKENIZER_DIR,
    WEIGHTS_FILE,
    Manifest,
    read_manifest,
    weights_files,
)
from trtc.protos.plan import read_plan
from trtc.runtime.executors.base import Executor
from trtc.runtime.executors.opening import Opening, OpenRequest, Prepare
from trtc.runtime.executors.weights import KeptWeights
from trtc.runtime.integrity.engine_files import (
    REBUILD,
    FileIdentity,
    check_unchanged,
    find_files,
    needed_files,
    refuse_unlisted,
    warn_of_damaged_reports,
)
from trtc.runtime.integrity.engine_relations import check_plan, check_weights_header
from trtc.runtime.integrity.file_watch import FileWatch
from trtc.runtime.integrity.verify import HashCheck
from trtc.runtime.text.tokenizer import TOKENIZER_FILE, Tokenizer


def _prepare_cpu(request: OpenRequest) -> Opening:
    from trtc.runtime.executors.cpu_opening import prepare_cpu

    return prepare_cpu(request)


def _prepare_cuda(request: OpenRequest) -> Opening:
    from trtc.runtime.executors.cuda.opening import prepare_cuda

    return prepare_cuda(request)


def _prepare_tensorrt(request: OpenRequest) -> Opening:
    from trtc.runtime.executors.tensorrt_opening import prepare_tensorrt

    return prepare_tensorrt(request)


def _prepare_tensorrt_rtx(request: OpenRequest) -> Opening:
    from trtc.runtime.executors.tensorrt_opening import prepare_tensorrt_rtx

    return prepare_tensorrt_rtx(request)


KINDS: Mapping[str, Prepare] = {
    "cpu": _prepare_cpu,
    "cuda": _prepare_cuda,
    "tensorrt": _prepare_tensorrt,
    "tensorrt_rtx": _prepare_tensorrt_rtx,
}
"""target.kind of the manifest -> opener of such engines, imported when one is opened."""
_DATA = {"cpu": WEIGHTS_FILE}
"""target.kind -> the file of weights. Wrong bytes in it only change numbers, because code accesses
it within fixed bounds."""


class Session(msgspec.Struct, frozen=True):
    """An engine that is ready to run. Close it to free the pool."""

    path: Path
    manifest: Manifest
    executor: Executor
    tokenizer: Tokenizer | None
    """None: the checkpoint had none, and the engine accepts token ids only."""
    late_check: HashCheck | None = None
    """Check of hashes that still runs; None: all are checked."""
    watch: FileWatch | None = None
    """Watches the files that stay mapped; None: there are none."""
    grammars: Mapping[str, StoredGrammar] = {}
    """Grammars that requests may use by name."""
    mapped_weights: FileIdentity | None = None
    """The file that the executor's weights are mapped from; None: they are not mapped."""

    def keep_weights(self) -> KeptWeights:
        """Weights for another `open_session` of the same engine, once this one is closed.

        Raises:
            UnsupportedError: the executor does not support it.
            EngineCorruptError: the weights' file has been written to.
        """
        weights = self.executor.weights_on_host()
        self.raise_if_changed()
        return KeptWeights(weights, self.manifest.digest, self.mapped_weights)

    def raise_if_changed(self) -> None:
        """Check, in microseconds, that no mapped file has been written to.

        Raises:
            EngineCorruptError: one has, so results are not reliable.
        """
        if self.watch is not None:
            self.watch.raise_if_changed()

    def close(self) -> None:
        if self.watch is not None:
            self.watch.close()
        if self.late_check is not None:
            self.late_check.close()
        if self.tokenizer is not None:
            self.tokenizer.close()
        self.executor.close()


def open_session(
    engine: Path,
    *,
    num_threads: int | None = None,
    kv_bytes: int | None = None,
    num_pages: int | None = None,
    dummy_weights: bool = False,
    verify: bool = True,
    quick_start: bool = False,
    digest: str = "",
    weights: KeptWeights | None = None,
) -> Session:
    """Verify an engine and load it.

    Args:
        engine: directory written by `trtc build`.
        num_threads: threads of kernels on a CPU; None: the physical cores allowed to this process.
        kv_bytes: bytes of the KV pool; None: as `num_pages` says.
        num_pages: pages of the KV pool; None with kv_bytes None: enough for max_batch_size
            sequences of max_seq_len, within a share of the memory that is free.
        dummy_weights: use random weights, for an engine that was built without any.
        verify: False skips the hashes (not the sizes) of files whose integrity is known.
        quick_start: defer work until after the first token, above all the hashes of a CPU engine's
            weights; the caller must wait for `Session.late_check` before it returns any result.
        digest: digest that the manifest must have; "": any.
        weights: weights of an earlier session; if they are of this engine, they are not read and
            hashed again. None: read them from the files.

    Raises:
        EngineCorruptError: a file is missing, or differs from the manifest.
        EngineUntrustedError: the manifest has another digest than `digest`.
        EngineIncompatibleError: the engine is of another version or for another machine.
        EnvironmentFault: too little memory, or the code does not load.
        RequestError: a contradictory or impossible argument.
    """
    manifest = read_manifest(engine)
    _check_digest(engine, manifest, digest)
    _check_dummy(manifest, dummy_weights)
    if num_threads is not None and num_threads < 1:
        raise RequestError(f"is {num_threads}", field="--threads", remedy="Give 1 or more")
    needed = needed_files(manifest)
    found = find_files(engine, manifest, needed)
    if verify:
        refuse_unlisted(engine, manifest)
        warn_of_damaged_reports(engine, manifest)
    late = _late_files(manifest) if verify and quick_start else ()
    of_weights = weights_files(manifest.target.tp)
    is_kept = weights is not None and weights.are_of(manifest.digest, found.get(of_weights[0]))
    known = (*late, *(of_weights if is_kept else ()))
    early = [name for name in needed if verify and name not in known]
    with ExitStack() as undo:
        early_check = HashCheck(engine, manifest, early, found)
        undo.callback(early_check.close)
        early_check.begin()
        prepare = KINDS[manifest.target.kind]
        opening = prepare(
            OpenRequest(
                engine,
                manifest,
                num_threads,
                dummy_weights,
                quick_start,
                found,
                verify,
                weights.data if weights is not None and is_kept else None,
            )
        )
        undo.callback(opening.close)
        pages = _num_pages(manifest, opening, kv_bytes, num_pages)
        _check_listed(manifest, opening)
        early_check.wait()
        early_check.close()
        _check_plan(engine, manifest, dummy_weights=dummy_weights)
        late_check = HashCheck(engine, manifest, late, found) if late else None
        if late_check is not None:
            undo.callback(late_check.close)
        executor = opening.open(pages)
        undo.callback(executor.close)
        tokenizer = _load_tokenizer(engine, manifest)
        grammars = read_grammars(engine, manifest)
        watch = FileWatch(engine, manifest, _mapped(manifest, found))
        undo.callback(watch.close)
        check_unchanged(engine, found)
        undo.pop_all()
    mapped = _mapped(manifest, found).get(WEIGHTS_FILE)
    return Session(engine, manifest, executor, tokenizer, late_check, watch, grammars, mapped)


def _load_tokenizer(engine: Path, manifest: Manifest) -> Tokenizer | None:
    if not manifest.has_tokenizer:
        return None
    prefix = f"{TOKENIZER_DIR}/"
    listed = {name.removeprefix(prefix) for name in manifest.files if name.startswith(prefix)}
    if TOKENIZER_FILE not in listed:
        raise EngineCorruptError(
            "is not listed", field=f"manifest.json: files.{prefix}{TOKENIZER_FILE}", remedy=REBUILD
        )
    return Tokenizer.load(engine / TOKENIZER_DIR, listed)


def _mapped(manifest: Manifest, found: Mapping[str, FileIdentity]) -> Mapping[str, FileIdentity]:
    """Files that stay mapped while an engine runs: weights on CPUs. Code is copied."""
    if manifest.target.kind != "cpu":
        return {}
    return {name: one for name, one in found.items() if name.endswith(".safetensors")}


def _late_files(manifest: Manifest) -> tuple[str, ...]:
    name = _DATA.get(manifest.target.kind)
    return (name,) if name in manifest.files else ()


def _check_digest(engine: Path, manifest: Manifest, wanted: str) -> None:
    if wanted and manifest.digest != wanted:
        raise EngineUntrustedError(
            f"is {manifest.digest}, and only {wanted} may be opened",
            field=f"{engine / MANIFEST_FILE}: digest",
            remedy="Serve the engine that was asked for, or give the digest of this one",
        )


def _check_plan(engine: Path, manifest: Manifest, *, dummy_weights: bool) -> None:
    if PLAN_FILE not in manifest.files:
        return
    plan = read_plan(engine / PLAN_FILE)
    check_plan(manifest, plan)
    if not dummy_weights:
        for name in weights_files(manifest.target.tp):
            check_weights_header(engine / name, plan.weights)


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


def _num_pages(
    manifest: Manifest, opening: Opening, kv_bytes: int | None, num_pages: int | None
) -> int:
    page_bytes = manifest.kv.page_bytes
    if kv_bytes is not None and num_pages is not None:
        raise RequestError("give either a size or a number of pages", field="--kv-bytes")
    if kv_bytes is not None:
        num_pages = kv_bytes // page_bytes
    free = opening.free_bytes()
    if num_pages is None:
        num_pages = _default_pages(manifest, opening, free)
    if num_pages < 1:
        raise RequestError(
            f"holds no page of {page_bytes} bytes", field="--kv-bytes", remedy="Give a larger pool"
        )
    if opening.max_pages is not None and num_pages > opening.max_pages:
        raise RequestError(
            f"holds {num_pages} pages, and the engine was built for {opening.max_pages} at most",
            field="--kv-bytes",
            remedy=f"Give at most {opening.max_pages * page_bytes}, or build with a larger "
            "--max-batch-size",
        )
    if num_pages * page_bytes > free:
        raise EnvironmentFault(
            f"a pool of {num_pages * page_bytes / 1e9:.2f} GB does not fit the "
            f"{max(0, free) / 1e9:.2f} GB that are free",
            field="--kv-bytes",
            remedy="Give a smaller pool",
        )
    return num_pages


def _default_pages(manifest: Manifest, opening: Opening, free: int) -> int:
    """Pages of all sequences at full length, as far as memory and engine allow."""
    wanted = manifest.limits.max_batch_size * manifest.kv.pages_of_sequence(
        manifest.limits.max_seq_len
    )
    room = int(free * opening.pool_share) // manifest.kv.page_bytes
    if room < 1:
        raise EnvironmentFault(
            f"{max(0, free) / 1e6:.0f} MB are free, too little for a KV pool",
            remedy="Free some memory",
        )
    return min(wanted, room, opening.max_pages or wanted)


def _check_listed(manifest: Manifest, opening: Opening) -> None:
    """Refuse files that the manifest does not list: they would be loaded without verification."""
    for name in opening.files:
        if name not in manifest.files:
            raise EngineCorruptError(
                "is not listed", field=f"manifest.json: files.{name}", remedy=REBUILD
            )
