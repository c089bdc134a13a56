"""Fair shares of a bounded resource: no client can take so many places that a new one finds none.

The bound of each holder is a dynamic threshold (Choudhury and Hahne, IEEE/ACM Transactions on
Networking 6(2), 1998): it may take another place while it holds fewer than alpha times the places
that are free. Alone it gets alpha / (1 + alpha) of all places; the more others hold, the fewer it
may take. While k holders have their maximum, one part in 1 + k * alpha stays free, so a new client
finds room unless there are about capacity / alpha such holders. Places are never revoked.

Two levels are limited: a client, and all clients of one host, since one user can run many. Trusted
principals are limited by the capacity alone.
"""

from collections import Counter
from typing import NamedTuple

from trtc.protos.errors import QueueFullError
from trtc.runtime.requests.principal import Principal

CLIENT_ALPHA = 2
"""A client alone may take two thirds of all places."""
HOST_ALPHA = 8
"""The clients of a host together may take eight ninths: one machine can use most of a server."""


class Resource(NamedTuple):
    """A bounded resource, and its wording in messages."""

    name: str
    """Name in metrics."""
    capacity: int
    holding: str
    """Noun for the places held, such as "waiting requests"."""
    option: str
    """Command-line option that raises the capacity."""


class Place:
    """One place, taken until it is freed. Freeing is idempotent."""

    def __init__(self, shares: "Shares", principal: Principal) -> None:
        self._shares = shares
        self._principal = principal
        self.is_taken = True

    def free(self) -> None:
        if self.is_taken:
            self.is_taken = False
            self._shares.give_back(self._principal)


class Shares:
    """The places of one resource. Not thread-safe."""

    def __init__(self, resource: Resource) -> None:
        self.resource = resource
        self._clients: Counter[str] = Counter()
        self._hosts: Counter[str] = Counter()
        """Places held, by name and by group of principals that hold any."""
        self.num_taken = 0

    def take(self, principal: Principal) -> Place:
        """Take a place.

        Raises:
            QueueFullError: all are taken, or the principal has its share of them.
        """
        resource, free = self.resource, self.resource.capacity - self.num_taken
        if free <= 0:
            raise QueueFullError(
                f"the server has its limit of {resource.capacity} {resource.holding}",
                remedy=f"Try again later, or raise {resource.option}",
                limit=resource.name,
            )
        if not principal.is_trusted:
            self._check(self._clients[principal.name], CLIENT_ALPHA, "this client")
            self._check(self._hosts[principal.group], HOST_ALPHA, "this client's host")
        self.num_taken += 1
        self._clients[principal.name] += 1
        self._hosts[principal.group] += 1
        return Place(self, principal)

    def give_back(self, principal: Principal) -> None:
        self.num_taken -= 1
        for counter, key in (
            (self._clients, principal.name),
            (self._hosts, principal.group),
        ):
            counter[key] -= 1
            if not counter[key]:
                del counter[key]

    def _check(self, held: int, alpha: int, holder: str) -> None:
        resource, free = self.resource, self.resource.capacity - self.num_taken
        if held >= alpha * free:
            raise QueueFullError(
                f"{holder} has its share of {held} {resource.holding} while {free} of "
                f"{resource.capacity} places are free",
                remedy=f"Wait until one of them has ended, or raise {resource.option}",
                limit=f"{resource.name}_share",
            )
