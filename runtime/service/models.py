"""Maps the names of models to engines.

    name -> Model: state, reason, engine          engine -> how many calls use it (leases)

Requests look up an engine by name and lease it: a replaced engine stays open until its last lease
has ended.
"""

import asyncio
import enum
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from trtc.protos.errors import UnavailableError, UnknownModelError
from trtc.runtime.engine.handle import EngineHandle


class ModelState(enum.Enum):
    """States of KServe's model repository."""

    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


@dataclass(frozen=True)
class Model:
    """A name, and its engine and state."""

    name: str
    state: ModelState
    reason: str = ""
    """Why it does not serve; "": it does."""
    engine: EngineHandle | None = None
    """None: the model is not open."""
    is_wanted: bool = True
    """Whether the server's readiness depends on it."""
    sleep_level: int = 0
    """0: it is awake, or not loaded."""


class Models:
    """The models of a server. Changed in its asyncio loop only; may be read from any thread.

    Args:
        names: names of the wanted models.
    """

    def __init__(self, names: Sequence[str] = ()) -> None:
        self._models = {name: Model(name, ModelState.LOADING, "opening") for name in names}
        self._leases: Counter[int] = Counter()
        """Number of leases, by the identity of the engine."""
        self._released = asyncio.Event()
        self._is_draining = False
        self._listeners: list[Callable[[], None]] = []

    @property
    def names(self) -> Sequence[str]:
        """Names of all models, including those that are not open."""
        return tuple(self._models)

    @property
    def engines(self) -> Mapping[str, EngineHandle]:
        """Engines of open models, by name."""
        models = self._models.copy().values()
        return {one.name: one.engine for one in models if one.engine is not None}

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    def get(self, name: str) -> Model | None:
        """The model of a name; None: there is none."""
        return self._models.get(name)

    def all(self) -> Sequence[Model]:
        return tuple(self._models.copy().values())

    def why_not_ready(self) -> dict[str, str]:
        """Name -> reason, for wanted models that are not ready."""
        return {one.name: one.reason for one in self.all() if one.is_wanted and one.reason}

    def is_ready(self, name: str) -> bool:
        """Whether a model is ready."""
        model = self._models.get(name)
        return model is not None and not model.reason

    def find(self, name: str) -> Model:
        """A model by name; if `name` is empty, the only wanted one.

        Raises:
            UnknownModelError: there is none, or several to choose from.
        """
        if not name:
            wanted = [one for one in self.all() if one.is_wanted]
            if len(wanted) == 1:
                return wanted[0]
        if name not in self._models:
            known = ", ".join(sorted(self._models))
            several = "several engines are served" if known else "no engine is served"
            raise UnknownModelError(
                f"no engine is called {name[:100]!r}" if name else several,
                field="model",
                remedy=f"Choose one of: {known}" if known else "Load one",
            )
        return self._models[name]

    def engine(self, name: str) -> EngineHandle:
        """The engine of a model; if `name` is empty, of the only one.

        Raises:
            UnknownModelError: there is none, or several to choose from.
            UnavailableError: it is not open.
        """
        model = self.find(name)
        if model.engine is None:
            raise _not_ready(model)
        return model.engine

    @contextmanager
    def lease(self, name: str) -> Iterator[EngineHandle]:
        """Like `engine`; the engine stays open until the context is left."""
        engine = self.engine(name)
        self._leases[id(engine)] += 1
        try:
            yield engine
        finally:
            self._leases[id(engine)] -= 1
            if not self._leases[id(engine)]:
                del self._leases[id(engine)]
                self._released.set()

    def check_serves(self, engine: EngineHandle) -> None:
        """Raises UnavailableError if a leased engine accepts no new requests. An engine that was
        replaced since the lease still does."""
        if self._is_draining:
            raise UnavailableError(
                "the server is shutting down", remedy="Send the request to another server"
            )
        model = self._models.get(engine.name)
        if model is not None and model.engine is engine and model.reason:
            raise _not_ready(model)

    def put(self, model: Model) -> None:
        """Set the model of a name."""
        self._models[model.name] = replace(model, reason="draining") if self._is_draining else model
        self._call_listeners()

    def set_ready(self, name: str, why_not: str = "") -> None:
        """Set whether an open model is ready, and why not. Does not end draining."""
        state = ModelState.UNAVAILABLE if why_not else ModelState.READY
        self.put(replace(self._models[name], state=state, reason=why_not))

    def remove(self, name: str) -> None:
        """Remove a name."""
        self._models.pop(name, None)
        self._call_listeners()

    def drain(self) -> None:
        """Refuse new requests to all models from now on."""
        self._is_draining = True
        self._models = {
            name: replace(one, state=ModelState.UNLOADING, reason="draining")
            for name, one in self._models.items()
        }
        self._call_listeners()

    async def unused(self, engine: EngineHandle, timeout_s: float | None) -> bool:
        """Wait until no call uses an engine; False after `timeout_s` seconds (None: no limit)."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self._leases[id(engine)]:
            self._released.clear()
            left = None if deadline is None else deadline - time.monotonic()
            try:
                async with asyncio.timeout(left):
                    await self._released.wait()
            except TimeoutError:
                return False
        return True

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener` now, and whenever a model changes."""
        self._listeners.append(listener)
        listener()

    def _call_listeners(self) -> None:
        for listener in self._listeners:
            listener()


def _not_ready(model: Model) -> UnavailableError:
    return UnavailableError(
        f"engine {model.name} is not ready: {model.reason}",
        field="model",
        remedy="Wait until health checks say SERVING",
    )
