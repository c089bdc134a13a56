"""What a frontend of a server is: inputs in, events out, errors in its protocol's own words.

    message --read--> RequestInput, Principal --Service.generate--> Outputs --write--> events
                                                              └───> TrtcError --table--> status

A frontend decides nothing: names, limits, fairness, tokenising and readiness are the service's, so
that the same input gives the same tokens and the same refusal whichever way it came. What is its
own: its port, who calls (`Principal`), how a message becomes a input (`RequestInput`, `Chat`), how
an Output becomes an event, and a table from the error tree to its statuses
(`protos.errors.by_class`).

`frontends.local` and `frontends.triton` are no `Frontend`s: a Python caller and Triton's server
start those themselves. They share `engine.admission` and the engine's loop with the service.
"""

import ipaddress
from abc import ABC, abstractmethod
from typing import ClassVar, Protocol

from trtc.runtime.service.service import Service


class Frontend(ABC):
    """One protocol's way into a server. Used in the server's asyncio loop only."""

    name: ClassVar[str]
    """Of the protocol, in log lines; unique in a server."""

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
        """Take the port and answer. Engines are not open yet: the service says which are ready.

        Raises:
            RequestError: the port cannot be had, or a file of the settings cannot be read.
        """

    @abstractmethod
    def drain(self) -> None:
        """The service takes no more requests; those that run go on."""

    @abstractmethod
    async def close(self, grace_s: float) -> None:
        """Stop answering; what is under way gets `grace_s` seconds. Also after a failed start."""


class FrontendConfig(Protocol):
    """A frontend's settings: frozen and complete, so that they can be logged and compared."""

    def frontend(self, service: Service) -> Frontend:
        """The frontend, not started."""
        ...


def url_host(host: str) -> str:
    """A host as it stands before a port."""
    return f"[{host}]" if ":" in host else host


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a port that is bound to `host`; a name counts as others'
    unless it is localhost."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
