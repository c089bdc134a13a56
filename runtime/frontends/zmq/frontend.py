"""The ZeroMQ port of a server: publishes KV events in vLLM's format."""

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from trtc.protos.errors import EnvironmentFault, RequestError
from trtc.runtime.frontends.base import Frontend, is_loopback
from trtc.runtime.service.service import Service

if TYPE_CHECKING:
    import zmq

    from trtc.runtime.frontends.zmq.messages import EventFormat
    from trtc.runtime.frontends.zmq.publisher import Publisher

ENDPOINT = "--kv-events"
REPLAY = "--kv-events-replay"
TOPIC = "--kv-events-topic"


@dataclass(frozen=True)
class ZmqConfig:
    endpoint: str = "tcp://127.0.0.1:5557"
    """Endpoint of the PUB socket, for subscribers."""
    replay: str = ""
    """Endpoint of the ROUTER socket, from which subscribers request missed batches; "": none."""
    topic: str = "kv@{host}@{model}"
    """Topic of each engine; `{host}` and `{model}` are filled in."""
    format: "EventFormat" = "map"

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches the endpoints."""
        given = [one for one in (self.endpoint, self.replay) if one]
        return all(one.startswith("ipc://") or is_loopback(_host(one)) for one in given)

    def check(self, names: Sequence[str]) -> None:
        """Check the settings for engines of these names.

        Raises:
            RequestError: an option is invalid; names it.
        """
        for option, endpoint in ((ENDPOINT, self.endpoint), (REPLAY, self.replay)):
            if endpoint and not endpoint.startswith(("tcp://", "ipc://")):
                raise RequestError(
                    f"is {endpoint[:100]!r}",
                    field=option,
                    remedy="Give tcp://ADDRESS:PORT or ipc://PATH to listen on",
                )
        try:
            topics = {self.topic_of(name) for name in names}
        except (KeyError, IndexError, ValueError) as error:
            raise RequestError(
                f"is {self.topic[:100]!r}",
                field=TOPIC,
                remedy="Only {host} and {model} may stand in braces",
            ) from error
        if len(topics) < len(names):
            raise RequestError(
                "is one for several engines", field=TOPIC, remedy="Have {model} in it"
            )

    def topic_of(self, name: str) -> bytes:
        return self.topic.format(host=socket.gethostname(), model=name).encode()

    def frontend(self, service: Service) -> "ZmqFrontend":
        return ZmqFrontend(self, service)


class ZmqFrontend(Frontend):
    """Publishes the KV events of all engines."""

    name: ClassVar[str] = "kv-events"

    def __init__(self, config: ZmqConfig, service: Service) -> None:
        super().__init__(_host(config.endpoint))
        self._config = config
        self._service = service
        self._publisher: Publisher | None = None
        self._endpoints: tuple[str, ...] = ()

    @property
    def address(self) -> str:
        return ",".join(self._endpoints)

    async def start(self) -> None:
        """
        Raises:
            EnvironmentFault: pyzmq is not installed. Also raises the errors of Frontend.start.
        """
        try:
            import zmq
        except ImportError as error:
            raise EnvironmentFault(
                "needs pyzmq", field=ENDPOINT, remedy="Install trtc[kv-events]"
            ) from error
        from trtc.runtime.frontends.zmq import publisher

        config = self._config
        context: zmq.Context[Any] = zmq.Context.instance()
        publish = context.socket(zmq.PUB)
        publish.sndhwm = publisher.HIGH_WATER_MARK
        _bind(publish, config.endpoint, ENDPOINT)
        replay = None
        if config.replay:
            replay = context.socket(zmq.ROUTER)
            replay.sndhwm, replay.rcvhwm = publisher.HIGH_WATER_MARK, publisher.MAX_WAITING_REPLAYS
            try:
                _bind(replay, config.replay, REPLAY)
            except RequestError:
                publish.close(linger=0)
                raise
        sockets = [publish] if replay is None else [publish, replay]
        self._endpoints = tuple(one.last_endpoint.decode().rstrip("\0") for one in sockets)
        self.port = int(self._endpoints[0].rpartition(":")[2]) if _is_tcp(config.endpoint) else 0
        self._publisher = publisher.Publisher(publish, replay, config.format)
        self._service.models.on_change(self._attach)

    def drain(self) -> None:
        """Nothing to do: events are published until the engines have stopped."""

    async def close(self, grace_s: float) -> None:
        if self._publisher is not None:
            publisher, self._publisher = self._publisher, None
            publisher.close()

    def _attach(self) -> None:
        """Publish the logs of engines that are open by now."""
        if self._publisher is None:
            return
        for name, handle in self._service.engines.items():
            if handle.loop.kv_events is not None:
                self._publisher.attach(self._config.topic_of(name), handle.loop.kv_events)


def _bind(one: "zmq.Socket[Any]", endpoint: str, option: str) -> None:
    """Bind a socket.

    Raises:
        RequestError: the address is not available; the socket has been closed.
    """
    import zmq

    from trtc.runtime.frontends.zmq.publisher import MAX_MESSAGE_BYTES

    one.maxmsgsize = MAX_MESSAGE_BYTES
    one.ipv6 = "[" in endpoint
    try:
        one.bind(endpoint)
    except zmq.ZMQError as error:
        one.close(linger=0)
        raise RequestError(
            f"cannot listen on {endpoint[:100]} ({error})",
            field=option,
            remedy="Choose another address or port; port * is any free one",
        ) from error


def _is_tcp(endpoint: str) -> bool:
    return endpoint.startswith("tcp://")


def _host(endpoint: str) -> str:
    return endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
