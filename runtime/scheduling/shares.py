"""Places of a bounded resource, of which nobody can take so many that a newcomer finds none.

The bound of each holder is a dynamic threshold (Choudhury and Hahne, IEEE/ACM Transactions on
Networking 6(2), 1998): it may take another place while it holds fewer than alpha times the places
that are free. Alone it gets alpha / (1 + alpha) of them all; the more others hold, the less it may
take. While k holders have all they may, one part in 1 + k * alpha stays free: a newcomer finds room
unless there are as many greedy holders as places, divided by alpha. Nothing is taken away again.

Two levels are bounded: a client, and all clients of one host, of which one person can run many.
Trusted principals are bound by the capacity alone.
"""

from collections import Counter
from typing import NamedTuple

from trtc.protos.errors import QueueFullError
from trtc.runtime.requests.principal import Principal

CLIENT_ALPHA = 2
"""A client alone takes two thirds of all places."""
HOST_ALPHA = 8
"""The clients of a host together take eight ninths: one machine can use most of a server."""


class Resource(NamedTuple):
    """What there are places of, and how messages word it."""

    name: str
    """For metrics."""
    capacity: int
    holding: str
    """What a holder of places has, such as "waiting requests"."""
    option: str
    """Raises the capacity."""


class Place:
    """One place that is taken, until it is freed. Freeing it again changes nothing."""

    def __init__(self, shares: "Shares", principal: Principal) -> None:
        self._shares = shares
        self._principal = principal
        self.is_taken = True

    def free(self) -> None:
        if self.is_taken:
            self.is_taken = False
            self._shares.give_back(self._principal)


class Shares:
    """The places of one resource. Callers lock."""

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
