"""vLLM's sleep routes: /sleep, /wake_up, /is_sleeping."""

from collections.abc import Mapping, Sequence

import msgspec

from trtc.protos.errors import InvalidRequestError, UnsupportedError
from trtc.runtime.frontends.http.exchange import Exchange
from trtc.runtime.frontends.http.plain import refuse_plainly
from trtc.runtime.frontends.http.routes import Route
from trtc.runtime.requests.principal import Principal, Scope
from trtc.runtime.service.model_control import ModelControl
from trtc.runtime.service.service import Service

_MODES = ("wait", "abort")


def sleep(service: Service) -> Sequence[Route]:
    """The routes by which models release their memory and reload."""
    handlers = _Handlers(service)
    return (
        Route("/sleep", {"POST": handlers.sleep}, refuse_plainly, Scope.ADMIN),
        Route("/wake_up", {"POST": handlers.wake_up}, refuse_plainly, Scope.ADMIN),
        Route("/is_sleeping", {"GET": handlers.is_sleeping}, refuse_plainly),
    )


class _Handlers:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def sleep(self, exchange: Exchange) -> None:
        query = exchange.query("level", "mode", "model")
        level, mode = query.get("level", "1"), query.get("mode", "wait")
        if level not in ("1", "2"):
            raise InvalidRequestError(
                f"is {level[:40]!r}",
                field="level",
                remedy="1 keeps weights in the host's memory, 2 keeps nothing",
            )
        if mode not in _MODES:
            raise InvalidRequestError(
                f"is {mode[:40]!r}", field="mode", remedy=f"Choose one of: {', '.join(_MODES)}"
            )
        names = self._names(query, exchange.principal)
        await self._ordered(exchange)
        slept = await self._control.sleep(int(level), names, aborts=mode == "abort")
        await _answer(exchange, {"slept": [one._asdict() for one in slept]})

    async def wake_up(self, exchange: Exchange) -> None:
        names = self._names(exchange.query("model"), exchange.principal)
        await self._ordered(exchange)
        woken = await self._control.wake(names)
        await _answer(exchange, {"woken": [one._asdict() for one in woken]})

    async def is_sleeping(self, exchange: Exchange) -> None:
        """Answer whether any model sleeps, and which, at which level."""
        names = self._names(exchange.query("model"), exchange.principal)
        models = [self._service.models.get(name) for name in names]
        levels = {one.name: one.sleep_level for one in models if one is not None}
        asleep = {name: level for name, level in levels.items() if level}
        await _answer(exchange, {"is_sleeping": bool(asleep), "models": asleep})

    @property
    def _control(self) -> ModelControl:
        if self._service.control is None:
            raise UnsupportedError("models do not sleep here")
        return self._service.control

    def _names(self, query: Mapping[str, str], principal: Principal) -> Sequence[str]:
        """The requested model, or all that the caller may use."""
        models = self._service.models
        if name := query.get("model"):
            self._service.check_model(principal, name)
            return [models.find(name).name]
        return [name for name in models.names if principal.limits.may_use(name)]

    async def _ordered(self, exchange: Exchange) -> None:
        """Read the body, whose content is ignored. From a browser it must have the type of JSON,
        which pages of other origins cannot send."""
        limit = self._service.limits.max_request_bytes
        taken = exchange.document(self._service.intake, limit, lambda body: None, any_type=True)
        async with taken:
            pass


async def _answer(exchange: Exchange, document: object) -> None:
    await exchange.answer(200, msgspec.json.encode(document))
