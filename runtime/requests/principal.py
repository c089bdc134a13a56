"""Who sent a request: ids, cached prefixes and shares of resources belong to a principal."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Principal:
    """One client, as the protocol that it speaks identifies it.

    Two kinds come over the network: a tenant, whom a client certificate names, wherever it
    connects from; and a connection, which is all that is known of an anonymous client.
    """

    name: str
    """Unique among principals."""
    group: str
    """What bounded resources count together: a tenant's own name, or the host of a connection."""
    is_anonymous: bool = False
    is_trusted: bool = False
    """Code of this process: no share limits it, and no client can name it."""


LOCAL = Principal("local", "local", is_trusted=True)
"""A caller in this process."""
INTERNAL = Principal("internal", "internal", is_trusted=True)
"""The server itself: canaries."""


Namespace = tuple[str, ...]
"""Whose prefixes: requests share cached pages within one namespace only."""
SHARED: Namespace = ("shared",)


def namespace_of(principal: Principal, salt: str, *, share_prefixes: bool = False) -> Namespace:
    """Where a request finds and leaves cached prefixes.

    Args:
        salt: a secret that clients agree upon to share prefixes, a tenant's within the tenant;
            "": none.
        share_prefixes: whether all anonymous clients share theirs.
    """
    if salt:
        return ("salt", "" if principal.is_anonymous else principal.name, salt)
    if principal.is_anonymous and share_prefixes:
        return SHARED
    return ("principal", principal.name)


def tenant(subject: str) -> Principal:
    """The holder of a client certificate; `subject` is the certificate's."""
    name = f"tenant {subject}"
    return Principal(name, name)


def connection(address: str, host: str) -> Principal:
    """An anonymous client; `address` names its connection, `host` where that comes from."""
    return Principal(f"connection {address}", f"host {host}", is_anonymous=True)
