"""Opens engines while others run, and closes them when they are no longer used.

open    ledger -> open, verify -> canaries           in a thread
retire  wait until no call uses the engine -> stop its loop -> close, which frees its memory
"""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from trtc.protos.errors import EngineIncompatibleError
from trtc.protos.manifest import read_manifest
from trtc.runtime.engine.canary import why_canaries_fail
from trtc.runtime.engine.config import EngineConfig, EngineSource, Opener
from trtc.runtime.engine.handle import EngineHandle
from trtc.runtime.host.memory import give_back_memory
from trtc.runtime.service.memory_ledger import MemoryLedger
from trtc.runtime.service.metrics import ServerMetrics
from trtc.runtime.service.models import Models
from trtc.runtime.service.phases import phase
from trtc.version import __version__

_log = logging.getLogger("trtc.server")

FAREWELL_S = 2.0
"""Seconds for streams to send their last message after their engine has stopped."""

T = TypeVar("T")


class EngineLifecycle:
    """Opens and closes the engines of a server. Used in its asyncio loop only.

    Args:
        opener: `opening.open_handle`, or a fake in tests.
        config: how each engine is opened.
    """

    def __init__(
        self,
        models: Models,
        opener: Opener,
        config: EngineConfig,
        metrics: ServerMetrics,
        ledger: MemoryLedger,
    ) -> None:
        self.ledger = ledger
        self._models = models
        self._opener = opener
        self._config = config
        self._metrics = metrics
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="trtc-models")
        self._retiring: dict[int, EngineHandle] = {}
        """Engines that get no new requests, by identity."""
        self._retirements: set[asyncio.Task[None]] = set()
        self._sources: dict[int, EngineSource] = {}
        """Sources of engines, by the engines' identity."""

    @property
    def retiring(self) -> list[EngineHandle]:
        """Engines that get no new requests and are not closed yet."""
        return list(self._retiring.values())

    def source_of(self, engine: EngineHandle) -> EngineSource:
        """The source of an open engine."""
        return self._sources[id(engine)]

    async def open(self, source: EngineSource) -> EngineHandle:
        """Open an engine, without running its canaries.

        Raises:
            TrtcError: the engine cannot be opened.
        """
        with phase(self._metrics, "open", source.name):
            engine = await self.in_thread(lambda: self._opener(source, self._config))
        self.ledger.hold(engine)
        self._sources[id(engine)] = source
        self._show(engine)
        return engine

    async def why_not(self, engine: EngineHandle) -> str:
        """Why an open engine's canaries fail; "": they pass."""
        with phase(self._metrics, "canaries", engine.name):
            why = await self.in_thread(lambda: why_canaries_fail(engine))
        if not why:
            _warn_without_canaries(engine)
        return why

    async def open_verified(self, source: EngineSource, kv_bytes: int | None) -> EngineHandle:
        """Open an engine that fits in memory with the others, and run its canaries.

        Args:
            kv_bytes: bytes of its KV pool; None: as in the config.

        Raises:
            EnvironmentFault: too little memory.
            EngineError: it is damaged, not for this machine, or fails its canaries.
        """
        engine = await self.in_thread(lambda: self._open_checked(source, kv_bytes))
        self._show(engine)
        return engine

    def retire_later(self, engine: EngineHandle) -> None:
        """Close an engine that was replaced, once its streams have ended."""
        task = asyncio.create_task(self._retired(engine))
        self._retirements.add(task)
        task.add_done_callback(self._retirements.discard)

    async def _retired(self, engine: EngineHandle) -> None:
        await self.retire(engine, None)
        _log.info("retired model=%s version=%s", engine.name, engine.version)

    async def retire(
        self,
        engine: EngineHandle,
        timeout_s: float | None,
        before_close: Callable[[], None] = lambda: None,
    ) -> int:
        """Close an engine that gets no new requests; returns the bytes that were reserved for it.

        Args:
            timeout_s: seconds for running requests to end; None: no limit.
            before_close: called in a thread after the engine's loop has stopped.
        """
        self._retiring[id(engine)] = engine
        if not await self._models.unused(engine, timeout_s):
            _log.warning("unload timed out model=%s: its requests are ended", engine.name)
        await asyncio.to_thread(engine.loop.stop)
        await self._models.unused(engine, FAREWELL_S)
        try:
            await asyncio.to_thread(before_close)
        finally:
            self._hide(engine)
            await asyncio.to_thread(engine.close)
            del self._retiring[id(engine)], self._sources[id(engine)]
            num_bytes = self.ledger.release(engine)
            await asyncio.to_thread(give_back_memory)
        return num_bytes

    async def in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._worker, work)

    async def stop(self) -> None:
        """Stop the loops of all engines; no engine retires after that."""
        for task in self._retirements:
            task.cancel()
        await asyncio.gather(*self._retirements, return_exceptions=True)
        for engine in self._all_engines():
            await asyncio.to_thread(engine.loop.stop)

    def close(self) -> None:
        """Close all engines, whose loops have stopped."""
        self._worker.shutdown(wait=True)
        for engine in self._all_engines():
            engine.close()

    def _open_checked(self, source: EngineSource, kv_bytes: int | None) -> EngineHandle:
        """Open an engine that fits in memory, and run its canaries."""
        config = self._config if kv_bytes is None else replace(self._config, kv_bytes=kv_bytes)
        manifest = read_manifest(source.path)
        pool = self.ledger.pool_bytes(source.name, manifest, config)
        # Open the engine whose manifest was measured.
        pinned = replace(source, digest=source.digest or manifest.digest)
        with phase(self._metrics, "open", source.name):
            engine = self._opener(pinned, replace(config, kv_bytes=pool))
        try:
            with phase(self._metrics, "canaries", source.name):
                why = why_canaries_fail(engine)
            if why:
                raise EngineIncompatibleError(
                    why,
                    field=f"{source.name}, version {source.version}",
                    remedy="Build the engine again for this machine",
                )
        except BaseException:
            engine.loop.stop()
            engine.close()
            raise
        _warn_without_canaries(engine)
        self.ledger.hold(engine)
        self._sources[id(engine)] = replace(pinned, weights=None)
        return engine

    def _all_engines(self) -> list[EngineHandle]:
        served = {id(one): one for one in self._models.engines.values()}
        return list({**served, **self._retiring}.values())

    def _show(self, engine: EngineHandle) -> None:
        self._metrics.engine_info.labels(*_labels(engine)).set(1)
        self._metrics.cache_info.labels(*_cache_labels(engine)).set(1)

    def _hide(self, engine: EngineHandle) -> None:
        model = self._models.get(engine.name)
        successor = None if model is None or model.engine is engine else model.engine
        if successor is None or _labels(successor) != _labels(engine):
            self._metrics.engine_info.remove(*_labels(engine))
        if successor is None or _cache_labels(successor) != _cache_labels(engine):
            self._metrics.cache_info.remove(*_cache_labels(engine))


def _labels(engine: EngineHandle) -> tuple[str, ...]:
    """Label values of the metric that describes the engine."""
    manifest = engine.manifest
    return (
        engine.name,
        manifest.model.family,
        manifest.scheme.name,
        manifest.target.name,
        manifest.digest,
        __version__,
    )


def _cache_labels(engine: EngineHandle) -> tuple[str, ...]:
    return engine.name, str(engine.manifest.kv.page_size), str(engine.num_pages)


def _warn_without_canaries(engine: EngineHandle) -> None:
    if not engine.manifest.canaries:
        _log.warning("engine=%s has no canaries: its tokens were not checked", engine.name)
