"""The contract of a server's frontend: requests in, events out, errors as its protocol's statuses.

    message --read--> RequestInput, Principal --Service.generate--> Outputs --write--> events
                                                              └───> TrtcError --table--> status

A frontend makes no decisions: names, limits, fairness, tokenising and readiness are the service's,
so that the same input gives the same tokens and the same errors over every protocol. A frontend has
its port, identifies the caller (`Principal`), converts messages to `RequestInput` or `Chat` and
Outputs to events, and maps the error tree to its statuses (`protos.errors.by_class`).

`frontends.local` and `frontends.triton` are not `Frontend`s: a Python caller and Triton's server
start them. They share `engine.admission` and the engine's loop with the service.
"""

import ipaddress
from abc import ABC, abstractmethod
from typing import ClassVar, Protocol

from trtc.runtime.service.service import Service


class Frontend(ABC):
    """One protocol's way into a server. Used in the server's asyncio loop only."""

    name: ClassVar[str]
    """Name of the protocol in log lines; unique in a server."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.port = 0
        """The bound port, once started."""

    @property
    def address(self) -> str:
        """`host:port`, once started."""
        return f"{url_host(self.host)}:{self.port}"

    @abstractmethod
    async def start(self) -> None:
        """Bind the port and start to answer. Engines may not be open yet; the service knows which
        are ready.

        Raises:
            RequestError: the port is not available, or a file of the settings cannot be read.
        """

    @abstractmethod
    def drain(self) -> None:
        """Called when the service starts to refuse new requests; running ones go on."""

    @abstractmethod
    async def close(self, grace_s: float) -> None:
        """Stop; requests in progress get `grace_s` seconds. Also called after a failed start."""


class FrontendConfig(Protocol):
    """A frontend's settings: frozen and complete, so that they can be logged and compared."""

    def frontend(self, service: Service) -> Frontend:
        """The frontend, not started."""
        ...


def url_host(host: str) -> str:
    """A host in the form for `host:port`: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host else host


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a port that is bound to `host`; false for all names except
    localhost."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
