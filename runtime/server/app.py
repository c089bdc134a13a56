"""A server from its configuration to its exit, in order: bind, open, verify, serve, drain, stop."""

import asyncio
import logging
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from trtc.protos.errors import EnvironmentFault, RequestError, TrtcError
from trtc.runtime.engine.config import EngineConfig, EngineSource, Opener
from trtc.runtime.engine.handle import EngineHandle
from trtc.runtime.engine.loop import LoopStats
from trtc.runtime.frontends.base import Frontend, FrontendConfig
from trtc.runtime.hooks.config import HooksConfig
from trtc.runtime.host.interpreter import few_collections
from trtc.runtime.server.process import prepare_process
from trtc.runtime.service.access import OPEN, Access, AccessConfig
from trtc.runtime.service.audit import Audit, AuditConfig
from trtc.runtime.service.engine_lifecycle import FAREWELL_S
from trtc.runtime.service.limits import ServiceLimits
from trtc.runtime.service.memory_ledger import MemoryLedger
from trtc.runtime.service.metrics import MetricsCompat, ServerMetrics
from trtc.runtime.service.model_control import ModelControl
from trtc.runtime.service.models import Models, ModelState
from trtc.runtime.service.phases import phase
from trtc.runtime.service.repository import DirectoryRepository, FixedRepository, Repository
from trtc.runtime.service.service import Service
from trtc.runtime.service.telemetry import TelemetryConfig, open_telemetry

if TYPE_CHECKING:
    from trtc.runtime.hooks.calls import HookCalls

_log = logging.getLogger("trtc.server")

_SHA256 = re.compile(r"[0-9a-fA-F]{64}")
WATCH_INTERVAL_S = 1.0
"""Seconds between two checks of engine loops: a dead one stops being ready within this time."""
THREAD_SWITCH_S = 0.2e-3
"""Python's switch interval: how long a busy thread keeps the GIL. The default of 5 ms is half of a
decode step, and writing the tokens of hundreds of streams keeps the asyncio thread busy for that
long, so engine threads would launch their next step late."""
EDITED_SWITCH_S = 0.05e-3
"""The same of a server with a logits_processor: from a step's tokens to the next draw, the engine's
thread and the hooks' take the GIL ten times, and each time from the asyncio thread."""


@dataclass(frozen=True)
class RepositoryConfig:
    """A directory of models, which may change while the server runs."""

    path: Path
    poll_s: float | None = None
    """Seconds between two checks of the directory, whose models are all served; None: models are
    loaded and unloaded by calls."""
    load: tuple[str, ...] = ()
    """Models to load at the start; without effect if the directory is polled."""


@dataclass(frozen=True)
class ServerConfig:
    """The configuration of a server; complete, so that it can be logged and compared."""

    engines: tuple[EngineSource, ...]
    """Engines that are served from the start, by their paths."""
    frontends: tuple[FrontendConfig, ...]
    """Frontends, each of another protocol."""
    limits: ServiceLimits = field(default_factory=ServiceLimits)
    engine: EngineConfig = field(default_factory=EngineConfig)
    """How each engine is opened."""
    drain_timeout_s: float = 30.0
    access: AccessConfig = OPEN
    """Authentication of clients."""
    audit: AuditConfig | None = None
    """None: requests are not recorded."""
    metrics_compat: MetricsCompat = "none"
    """Server under whose names metrics are exposed in addition to our own."""
    telemetry: TelemetryConfig | None = None
    """None: no export to OpenTelemetry."""
    hooks: HooksConfig | None = None
    """None: there are no operator hooks."""
    repository: RepositoryConfig | None = None
    """A directory of engines, instead of `engines`."""


class Server:
    """One process's server. Make it in a running event loop, then `run` it.

    Args:
        opener: `opening.open_handle`, or a fake in tests.

    Raises:
        RequestError: the file of API keys cannot be read.
        EnvironmentFault: telemetry is on, and OpenTelemetry is not installed.
    """

    def __init__(self, config: ServerConfig, *, opener: Opener) -> None:
        self.config = config
        self.metrics = ServerMetrics(config.metrics_compat)
        self._stopping = asyncio.Event()
        self._hurry = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None
        self._follower: asyncio.Task[None] | None = None
        self._sampler: asyncio.Task[None] | None = None
        self._failure: TrtcError | None = None
        self._ended: dict[str, EngineHandle] = {}
        """Engines that have failed and will not be ready again."""
        self._audit = Audit(config.audit, self.metrics)
        access = Access(config.access, self.metrics.strangers.inc)
        self._hooks: HookCalls | None = None
        if config.hooks is not None:
            from trtc.runtime.hooks import calls
            from trtc.runtime.service.hooks import hooked_opener

            self._hooks = calls.HookCalls(config.hooks)
            opener = hooked_opener(opener, self._hooks)
        self._telemetry = None if config.telemetry is None else open_telemetry(config.telemetry)
        repository = _repository(config)
        self.models = Models(_wanted(config, repository))
        self.control = ModelControl(
            self.models,
            repository,
            opener,
            config.engine,
            self.metrics,
            MemoryLedger(has_several=config.repository is not None or len(config.engines) > 1),
            unload_timeout_s=config.drain_timeout_s,
            takes_orders=config.repository is None or config.repository.poll_s is None,
        )
        self.service = Service(
            self.models,
            config.limits,
            self.metrics,
            access,
            self._audit,
            self._hooks,
            self.control,
            self._telemetry,
        )
        self.metrics.watch_loops(self._loop_stats)
        frontends = [one.frontend(self.service) for one in config.frontends]
        self.frontends: Mapping[str, Frontend] = {one.name: one for one in frontends}
        """Frontends by the names of their protocols."""
        assert len(self.frontends) == len(frontends), "two frontends of one protocol"

    def stop(self) -> None:
        """Make `run` drain and return; a second call ends running requests."""
        if self._stopping.is_set():
            self._hurry.set()
        self._stopping.set()

    async def run(self) -> None:
        """Serve until SIGTERM, SIGINT or `stop`, then drain.

        Raises:
            TrtcError: the server could not start, or its last engine has failed.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        sys.setswitchinterval(THREAD_SWITCH_S)
        prepare_process()
        try:
            await self.start()
            if self._hooks is not None and "logits_processor" in self._hooks.methods:
                sys.setswitchinterval(EDITED_SWITCH_S)
            self._announce()
            with few_collections():
                await self._stopping.wait()
            _log.info("draining open_streams=%d", self.service.num_open)
        finally:
            await self.close()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
        if self._failure is not None:
            raise self._failure

    async def start(self) -> None:
        """Bind the ports, open the engines, run their canaries."""
        self._audit.open()
        with phase(self.metrics, "listen"):
            # Ports first, so that a port in use is reported before an engine is mapped.
            for frontend in self.frontends.values():
                await frontend.start()
        sampling = self.service.activity.run(self._loop_stats)
        self._sampler = asyncio.create_task(sampling, name="trtc-sample-activity")
        if self._hooks is not None:
            with phase(self.metrics, "hooks"):
                await self._hooks.start()
        for source in self.config.engines:
            if not self._stopping.is_set():
                await self.control.open(source)
        for handle in self.models.engines.values():
            if not self._stopping.is_set():
                await self.control.verify(handle)
        if self.config.repository is not None:
            await self._start_repository(self.config.repository)
        self._watcher = asyncio.create_task(self._watch_loops(), name="trtc-watch-loops")

    async def close(self) -> None:
        """Drain, then stop everything that `start` started."""
        self.service.drain()
        for frontend in self.frontends.values():
            frontend.drain()
        for task in (self._watcher, self._follower):
            if task is not None:
                task.cancel()
        if not await self._drained():
            _log.warning("drain timed out open_streams=%d", self.service.num_open)
        await self.control.stop()
        await self.service.wait_idle(FAREWELL_S)
        if self._sampler is not None:
            self._sampler.cancel()
        for frontend in self.frontends.values():
            await frontend.close(FAREWELL_S)
        self.service.close()
        if self._hooks is not None:
            await self._hooks.close()
        await asyncio.to_thread(self._audit.close)
        if self._telemetry is not None:
            await asyncio.to_thread(self._telemetry.close)
        self.control.close()
        _log.info("stopped")

    def _announce(self) -> None:
        """Log the addresses once the server accepts clients: scripts wait for this line."""
        if self._stopping.is_set():
            return
        names = ",".join(self.models.names)
        addresses = " ".join(f"{one.name}={one.address}" for one in self.frontends.values())
        word = "serving" if not self.service.why_not_ready() else "listening, but not ready"
        _log.info("%s engines=%s %s", word, names, addresses)

    async def _start_repository(self, config: RepositoryConfig) -> None:
        if config.poll_s is None:
            await self.control.load_all(config.load)
            return
        await self.control.follow()
        following = self._follow_repository(config.poll_s)
        self._follower = asyncio.create_task(following, name="trtc-follow-models")

    async def _follow_repository(self, poll_s: float) -> None:
        while True:
            await asyncio.sleep(poll_s)
            await self.control.follow()

    async def _drained(self) -> bool:
        idle = asyncio.create_task(self.service.wait_idle(self.config.drain_timeout_s))
        hurry = asyncio.create_task(self._hurry.wait())
        await asyncio.wait((idle, hurry), return_when=asyncio.FIRST_COMPLETED)
        drained = idle.done() and idle.result()
        for task in (idle, hurry):
            task.cancel()
        await asyncio.gather(idle, hurry, return_exceptions=True)
        return drained

    async def _watch_loops(self) -> None:
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            for handle in self.models.engines.values():
                model = self.models.get(handle.name)
                if model is None or model.state is ModelState.UNLOADING:
                    continue
                if not handle.loop.healthy():
                    self._end_readiness(handle, "its loop has died; restart the server")
                    continue
                try:
                    await asyncio.to_thread(handle.raise_if_changed)
                except TrtcError as error:
                    self._end_readiness(handle, str(error))
                    await asyncio.to_thread(handle.loop.stop)
            self._end_if_none_lives()

    def _end_readiness(self, handle: EngineHandle, reason: str) -> None:
        """Mark an engine as not ready for good; the first reason is kept."""
        model = self.models.get(handle.name)
        if model is None or model.engine is not handle or self._ended.get(handle.name) is handle:
            return
        self._ended[handle.name] = handle
        _log.error("not ready engine=%s reason=%s", handle.name, reason)
        self.models.set_ready(handle.name, reason)

    def _end_if_none_lives(self) -> None:
        """Stop if no engine is left, unless another can be loaded: a supervisor can restart the
        server."""
        if self.config.repository is not None:
            return
        failed = [one for one in self.models.engines.values() if one.loop.failure]
        if failed and len(failed) == len(self.config.engines) and not self._stopping.is_set():
            last = failed[-1]
            self._failure = EnvironmentFault(
                f"engine {last.name} has failed: {last.loop.failure}", remedy="Restart the server"
            )
            self.stop()

    def _loop_stats(self) -> Mapping[str, LoopStats]:
        return {name: one.loop.stats() for name, one in self.models.engines.items()}


def _repository(config: ServerConfig) -> Repository:
    if config.repository is None:
        return FixedRepository(config.engines)
    return DirectoryRepository(config.repository.path)


def _wanted(config: ServerConfig, repository: Repository) -> Sequence[str]:
    """The models that must be ready for the server to be ready."""
    if config.repository is None or config.repository.poll_s is not None:
        return repository.names()
    return config.repository.load


def engine_sources(arguments: tuple[str, ...]) -> tuple[EngineSource, ...]:
    """Parse arguments `PATH` or `NAME=PATH`; the default name is that of the directory.

    Raises:
        RequestError: a name is empty, or given twice.
    """
    sources: dict[str, EngineSource] = {}
    for argument in arguments:
        name, equals, path = argument.partition("=")
        if not equals or Path(argument).exists():
            name, path = Path(argument).resolve().name, argument
        if not name or name in sources:
            raise RequestError(
                f"the name {name!r} is given twice" if name else "an engine needs a name",
                field=argument,
                remedy="Name engines with NAME=PATH, each name once",
            )
        sources[name] = EngineSource(name, Path(path))
    return tuple(sources.values())


def pin_digests(
    sources: tuple[EngineSource, ...], digests: tuple[str, ...]
) -> tuple[EngineSource, ...]:
    """Sources with the digests of `SHA256` (if there is one engine) or `NAME=SHA256`.

    Raises:
        RequestError: not a digest, an unknown engine, or two digests of one engine.
    """
    pinned: dict[str, str] = {}
    names = [source.name for source in sources]
    for argument in digests:
        name, equals, digest = argument.rpartition("=")
        if not equals and len(names) == 1:
            name = names[0]
        problem = ""
        if not _SHA256.fullmatch(digest):
            problem = f"{digest[:80]!r} is not 64 hexadecimal digits"
        elif name not in names:
            problem = f"names no engine that is served: {name!r}" if name else "needs a name"
        elif name in pinned:
            problem = f"is given twice for {name}"
        if problem:
            raise RequestError(
                problem, field="--digest", remedy="Give NAME=SHA256, as `trtc inspect` shows it"
            )
        pinned[name] = digest.lower()
    return tuple(replace(source, digest=pinned.get(source.name, "")) for source in sources)
