"""Which engine serves a model's name now.

    name -> Model: state, reason, engine          engine -> how many calls use it (leases)

Requests ask by name and lease the engine that they find: an engine that another one has replaced
stays open until its last lease has ended.
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
    """As KServe's repository names them."""

    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


@dataclass(frozen=True)
class Model:
    """A name, and what stands behind it."""

    name: str
    state: ModelState
    reason: str = ""
    """Why it does not serve; empty where it does."""
    engine: EngineHandle | None = None
    """None: it is not open."""
    is_wanted: bool = True
    """Whether the server is not ready without it."""
    sleep_level: int = 0
    """0: it is awake, or not loaded."""


class Models:
    """The models of a server. Changed in its asyncio loop only; may be read from any thread.

    Args:
        names: of those that the server is to serve.
    """

    def __init__(self, names: Sequence[str] = ()) -> None:
        self._models = {name: Model(name, ModelState.LOADING, "opening") for name in names}
        self._leases: Counter[int] = Counter()
        """By the identity of their engine."""
        self._released = asyncio.Event()
        self._is_draining = False
        self._listeners: list[Callable[[], None]] = []

    @property
    def names(self) -> Sequence[str]:
        """Of all models, those included that are not open."""
        return tuple(self._models)

    @property
    def engines(self) -> Mapping[str, EngineHandle]:
        """Of models that are open, by name."""
        models = self._models.copy().values()
        return {one.name: one.engine for one in models if one.engine is not None}

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    def get(self, name: str) -> Model | None:
        """None: there is no such model."""
        return self._models.get(name)

    def all(self) -> Sequence[Model]:
        return tuple(self._models.copy().values())

    def why_not_ready(self) -> dict[str, str]:
        """Name -> reason, for wanted models that do not serve now."""
        return {one.name: one.reason for one in self.all() if one.is_wanted and one.reason}

    def is_ready(self, name: str) -> bool:
        """Whether a model serves now."""
        model = self._models.get(name)
        return model is not None and not model.reason

    def find(self, name: str) -> Model:
        """A model; the only one that is wanted when `name` is empty.

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
        """The engine of a model; of the only one when `name` is empty.

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
        """`engine`, which stays open until the context is left."""
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
        """Raises UnavailableError unless a new request may go to a leased engine. One that was
        replaced meanwhile still takes it."""
        if self._is_draining:
            raise UnavailableError(
                "the server is shutting down", remedy="Send the request to another server"
            )
        model = self._models.get(engine.name)
        if model is not None and model.engine is engine and model.reason:
            raise _not_ready(model)

    def put(self, model: Model) -> None:
        """Say what stands behind a name from now on."""
        self._models[model.name] = replace(model, reason="draining") if self._is_draining else model
        self._call_listeners()

    def set_ready(self, name: str, why_not: str = "") -> None:
        """Let an open model serve, or keep it from serving and say why. Draining is not undone."""
        state = ModelState.UNAVAILABLE if why_not else ModelState.READY
        self.put(replace(self._models[name], state=state, reason=why_not))

    def remove(self, name: str) -> None:
        """Forget a name."""
        self._models.pop(name, None)
        self._call_listeners()

    def drain(self) -> None:
        """No model takes new requests any more."""
        self._is_draining = True
        self._models = {
            name: replace(one, state=ModelState.UNLOADING, reason="draining")
            for name, one in self._models.items()
        }
        self._call_listeners()

    async def unused(self, engine: EngineHandle, timeout_s: float | None) -> bool:
        """Wait until no call uses an engine; False after `timeout_s`, None: wait for ever."""
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
