"""Loads, unloads, puts to sleep and wakes models while the server runs.

    load    find -> ledger -> open, verify -> canaries -> new requests get it -> the old one retires
            └────────── a thread ───────────────────┘
    unload  no new requests -> running ones end -> close
    sleep   like unload, but the name stays, and at level 1 the weights stay in host memory
    wake    like load, of the engine that went to sleep

Operations run one at a time, in the order of the calls, and complete even if the caller
disconnects. If a load fails, the previous engine stays.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from trtc.protos.errors import (
    EnvironmentFault,
    TrtcError,
    UnknownModelError,
    UnsupportedError,
)
from trtc.protos.manifest import read_manifest
from trtc.runtime.engine.config import EngineConfig, EngineSource, Opener
from trtc.runtime.engine.handle import EngineHandle
from trtc.runtime.executors.weights import KeptWeights
from trtc.runtime.service.engine_lifecycle import EngineLifecycle
from trtc.runtime.service.memory_ledger import MemoryLedger
from trtc.runtime.service.metrics import ServerMetrics
from trtc.runtime.service.models import Model, Models, ModelState
from trtc.runtime.service.repository import Found, Repository

_log = logging.getLogger("trtc.server")

NOT_LOADED = "not loaded"

T = TypeVar("T")


class Entry(NamedTuple):
    """A line of the repository's index."""

    name: str
    version: str
    """Empty: the model was never opened."""
    state: ModelState
    reason: str


class Slept(NamedTuple):
    """The result of putting a model to sleep."""

    model: str
    level: int
    seconds: float
    freed_bytes: int
    """Bytes reserved on the engine's device: weights, activations, KV pool."""
    kept_bytes: int
    """Bytes of weights kept in host memory."""


class Woken(NamedTuple):
    model: str
    seconds: float
    """Seconds until its canaries had passed."""


class _Asleep(NamedTuple):
    """How to open an engine again."""

    level: int
    source: EngineSource
    kv_bytes: int
    """Bytes of its KV pool before."""


class ModelControl:
    """Loads and unloads the models of a server. Used in its asyncio loop only."""

    def __init__(
        self,
        models: Models,
        repository: Repository,
        opener: Opener,
        config: EngineConfig,
        metrics: ServerMetrics,
        ledger: MemoryLedger,
        *,
        unload_timeout_s: float,
        takes_orders: bool,
    ) -> None:
        """
        Args:
            opener: `opening.open_handle`, or a fake in tests.
            config: how each engine is opened.
            unload_timeout_s: seconds for running requests to end when their model is unloaded.
            takes_orders: whether callers may load and unload; otherwise exactly the models of the
                repository are served.
        """
        self._models = models
        self._repository = repository
        self._metrics = metrics
        self._engines = EngineLifecycle(models, opener, config, metrics, ledger)
        self._unload_timeout_s = unload_timeout_s
        self._takes_orders = takes_orders
        self._turn = asyncio.Lock()
        self._under_way: set[asyncio.Task[Any]] = set()
        self._asleep: dict[str, _Asleep] = {}
        self._seen: dict[str, tuple[int, ...]] = {}
        """Name -> mark of the engine that `follow` last found."""
        self._failures: dict[str, str] = {}
        """Name -> the last error that `follow` has logged."""

    # At the start: what fails, fails the server.

    async def open(self, source: EngineSource) -> None:
        """Open an engine, which `verify` must check next.

        Raises:
            TrtcError: the engine cannot be opened.
        """
        engine = await self._engines.open(source)
        reason = "running its canaries"
        self._models.put(Model(source.name, ModelState.LOADING, reason, engine))

    async def verify(self, engine: EngineHandle) -> None:
        """Mark an open engine as ready if its canaries pass."""
        why = await self._engines.why_not(engine)
        self._models.set_ready(engine.name, why)
        if why:
            _log.error("not ready engine=%s reason=%s", engine.name, why)

    # While it runs.

    async def load(self, name: str, kv_bytes: int | None = None) -> None:
        """Load the newest version of a model; does nothing if that version is loaded.

        Args:
            kv_bytes: bytes of its KV pool; None: as for the server's other models.

        Raises:
            UnknownModelError: the repository has no such model.
            EnvironmentFault: too little memory.
            EngineError: the engine is damaged, not for this machine, or fails its canaries.
            UnsupportedError: the server follows the repository, and does not load by calls.
        """
        self._check_orders()
        await self._alone(lambda: self._load(name, kv_bytes))

    async def unload(self, name: str) -> None:
        """Unload a model; returns when its memory is free.

        Raises:
            UnknownModelError: there is no such model.
            UnsupportedError: the server follows the repository, and does not unload by calls.
        """
        self._check_orders()
        await self._alone(lambda: self._unload(name))

    async def sleep(self, level: int, names: Sequence[str], *, aborts: bool) -> list[Slept]:
        """Free the memory of models until they are woken; their new requests are refused.

        Args:
            level: 1: keep weights in host memory; 2: keep nothing.
            names: names of models; models that are not open are skipped.
            aborts: end running requests at once; else they get the timeout of `unload`.

        Raises:
            UnsupportedError: level 1, and the engine cannot keep its weights in host memory.
        """
        return await self._alone(lambda: self._sleep(level, names, aborts=aborts))

    async def wake(self, names: Sequence[str]) -> list[Woken]:
        """Open sleeping models again, with the same settings. They stay asleep if that fails.

        Raises:
            EnvironmentFault: too little memory.
            EngineError: the engine's files have changed, or are damaged.
        """
        return await self._alone(lambda: self._wake(names))

    async def load_all(self, names: Sequence[str]) -> None:
        """Load models; a failure is logged, and the server is not ready without the model."""
        for name in names:
            try:
                await self._alone(lambda name=name: self._load(name, None))  # type: ignore[misc]
            except TrtcError as error:
                _log.error("not loaded model=%s reason=%s", name, error)

    async def follow(self) -> None:
        """Serve the models that the repository has now. Failures are logged, and tried again after
        the model has changed, or if memory was too small."""
        try:
            await self._alone(self._follow)
        except TrtcError as error:
            _log.error("cannot look for models: %s", error)

    async def index(self) -> list[Entry]:
        """All models that can be loaded, and all that are loaded."""
        found = await asyncio.to_thread(self._repository.names)
        entries = [_entry(one) for one in self._models.all()]
        entries += [
            Entry(one.name, one.version, ModelState.UNLOADING, "its streams go on")
            for one in self._engines.retiring
        ]
        known = {one.name for one in entries}
        entries += [
            Entry(name, "", ModelState.UNAVAILABLE, NOT_LOADED)
            for name in found
            if name not in known
        ]
        return sorted(entries, key=lambda one: (one.name, one.version))

    # At the end.

    async def stop(self) -> None:
        """Stop all engines' loops; their requests end with UnavailableError."""
        await self._engines.stop()  # an unload in progress waits for its model's requests
        await asyncio.gather(*self._under_way, return_exceptions=True)
        await self._engines.stop()  # engines of a load that was in progress

    def close(self) -> None:
        """Close all engines, whose loops have stopped."""
        self._engines.close()

    # One at a time.

    async def _load(self, name: str, kv_bytes: int | None) -> None:
        found = await self._engines.in_thread(lambda: self._repository.find(name))
        before = self._models.get(name)
        if kv_bytes is None and await self._engines.in_thread(lambda: _is_served(before, found)):
            return
        is_wanted = before is not None and before.is_wanted
        if before is None or before.engine is None:
            self._models.put(Model(name, ModelState.LOADING, "loading", is_wanted=is_wanted))
        begin = time.perf_counter()
        try:
            engine = await self._engines.open_verified(found.source, kv_bytes)
        except BaseException as error:
            self._metrics.model_loads.labels(name, "failed").inc()
            if before is None or before.engine is None:
                reason = str(error) or type(error).__name__
                failed = Model(name, ModelState.UNAVAILABLE, reason, is_wanted=is_wanted)
                self._models.put(failed)
            raise
        seconds = time.perf_counter() - begin
        self._models.put(Model(name, ModelState.READY, engine=engine))
        self._metrics.model_loads.labels(name, "loaded").inc()
        self._metrics.model_load_seconds.labels(name).set(seconds)
        _log.info(
            "loaded model=%s version=%s digest=%s seconds=%.3f",
            name,
            engine.version,
            engine.manifest.digest,
            seconds,
        )
        self._forget_sleep(name)
        if before is not None and before.engine is not None:
            self._engines.retire_later(before.engine)

    async def _unload(self, name: str) -> None:
        model = self._models.get(name)
        if model is None:
            if name in await self._engines.in_thread(self._repository.names):
                return  # it is not loaded
            raise UnknownModelError(f"no engine is called {name[:100]!r}", field="model_name")
        if model.engine is not None:
            reason = "it is being unloaded"
            leaving = replace(model, state=ModelState.UNLOADING, reason=reason, is_wanted=False)
            self._models.put(leaving)
            begin = time.perf_counter()
            num_bytes = await self._engines.retire(model.engine, self._unload_timeout_s)
            seconds = time.perf_counter() - begin
            _log.info("unloaded model=%s bytes=%d seconds=%.3f", name, num_bytes, seconds)
            self._metrics.model_unloads.labels(name).inc()
        self._forget_sleep(name)
        self._models.remove(name)

    async def _sleep(self, level: int, names: Sequence[str], *, aborts: bool) -> list[Slept]:
        engines = [self._models.engines[one] for one in names if one in self._models.engines]
        for engine in engines:
            if level == 1 and engine.keep_weights is None:
                raise UnsupportedError(
                    f"{engine.name}, for {engine.manifest.target.name}, cannot have its weights in "
                    "the host's memory",
                    field="level",
                    remedy="Ask for level 2, which reads them again",
                )
        return [await self._put_to_sleep(engine, level, aborts=aborts) for engine in engines]

    async def _put_to_sleep(self, engine: EngineHandle, level: int, *, aborts: bool) -> Slept:
        begin, name = time.perf_counter(), engine.name
        is_asleep = Model(
            name, ModelState.UNAVAILABLE, f"it is asleep (level {level})", sleep_level=level
        )
        self._models.put(replace(is_asleep, state=ModelState.UNLOADING, engine=engine))
        # Wake exactly the engine that went to sleep.
        source = replace(self._engines.source_of(engine), digest=engine.manifest.digest)
        kv_bytes = engine.num_pages * engine.manifest.kv.page_bytes
        kept: list[KeptWeights] = []

        def keep() -> None:
            if level == 1 and engine.keep_weights is not None:
                kept.append(engine.keep_weights())

        try:
            freed = await self._engines.retire(
                engine, 0 if aborts else self._unload_timeout_s, keep
            )
        finally:
            weights = kept[0] if kept else None
            self._asleep[name] = _Asleep(level, replace(source, weights=weights), kv_bytes)
            self._models.put(is_asleep)
        if weights is not None:
            self._engines.ledger.hold_weights(name, weights)
        num_kept = 0 if weights is None else weights.data.nbytes
        slept = Slept(name, level, time.perf_counter() - begin, freed, num_kept)
        _log.info(
            "asleep model=%s level=%d freed_bytes=%d kept_bytes=%d seconds=%.3f",
            name,
            level,
            freed,
            num_kept,
            slept.seconds,
        )
        return slept

    async def _wake(self, names: Sequence[str]) -> list[Woken]:
        return [await self._wake_up(name) for name in names if name in self._asleep]

    async def _wake_up(self, name: str) -> Woken:
        begin, asleep = time.perf_counter(), self._asleep[name]
        weights = asleep.source.weights
        if weights is not None:
            self._engines.ledger.release(weights)
        try:
            engine = await self._engines.open_verified(asleep.source, asleep.kv_bytes)
        except BaseException:
            if weights is not None:
                self._engines.ledger.hold_weights(name, weights)
            raise
        del self._asleep[name]
        self._models.put(Model(name, ModelState.READY, engine=engine))
        woken = Woken(name, time.perf_counter() - begin)
        _log.info("awake model=%s seconds=%.3f", name, woken.seconds)
        return woken

    def _forget_sleep(self, name: str) -> None:
        asleep = self._asleep.pop(name, None)
        if asleep is not None and asleep.source.weights is not None:
            self._engines.ledger.release(asleep.source.weights)

    async def _follow(self) -> None:
        seen = self._seen
        names = await self._engines.in_thread(self._repository.names)
        for gone in [name for name in self._models.names if name not in names]:
            seen.pop(gone, None)
            await self._unload(gone)
        for name in names:
            try:
                found = await self._engines.in_thread(lambda name=name: self._repository.find(name))  # type: ignore[misc]
                if seen.get(name) != found.mark and name not in self._asleep:
                    seen[name] = found.mark
                    await self._load(name, None)
            except EnvironmentFault as error:
                del seen[name]  # there may be room next time
                self._log_once(name, error)
            except TrtcError as error:
                self._log_once(name, error)

    def _log_once(self, name: str, error: TrtcError) -> None:
        if self._failures.get(name) != str(error):
            self._failures[name] = str(error)
            _log.error("not loaded model=%s reason=%s", name, error)

    def _check_orders(self) -> None:
        if not self._takes_orders:
            raise UnsupportedError(
                "the server serves what the directory of its models has",
                remedy="Change the directory, or start the server with --explicit",
            )

    async def _alone(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run an operation in its turn, and to its end even if the caller is cancelled."""

        async def in_turn() -> T:
            async with self._turn:
                return await work()

        task = asyncio.create_task(in_turn())
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        return await asyncio.shield(task)


def _is_served(model: Model | None, found: Found) -> bool:
    """Whether the engine found is the one being served."""
    if model is None or model.engine is None or model.reason:
        return False
    manifest = read_manifest(found.source.path)
    served = model.engine
    return (manifest.digest, found.source.version) == (served.manifest.digest, served.version)


def _entry(model: Model) -> Entry:
    version = "" if model.engine is None else model.engine.version
    return Entry(model.name, version, model.state, model.reason)
