"""Who sent a request: ids, cached prefixes and shares of resources belong to a principal."""

import enum
import ipaddress

import msgspec

from trtc.runtime.requests.tenant_limits import NO_LIMITS, TenantLimits

_TENANT = "tenant "
IPV6_HOST_BITS = 64
"""Host bits of an IPv6 address, which are ignored: a host may use any address of its network."""


class Scope(enum.Enum):
    """Permission that a path or method of a port requires."""

    INFERENCE = "inference"
    METRICS = "metrics"
    EVENTS = "events"
    """Reading cache events, which have token ids of all clients' prompts."""
    ADMIN = "admin"
    """Loading, unloading, sleeping and waking models."""


ALL_SCOPES = frozenset(Scope)
CONNECTION_SCOPES = ALL_SCOPES - {Scope.ADMIN}
"""Scopes of an anonymous client."""
CERTIFICATE_SCOPES = CONNECTION_SCOPES - {Scope.EVENTS}
"""Scopes of a client certificate without an API key."""


class Principal(msgspec.Struct, frozen=True, eq=False):
    """One client, as the protocol that it speaks identifies it.

    Two kinds come over the network: a tenant, identified by an API key or a client certificate from
    any host; and a connection, which identifies an anonymous client.
    """

    name: str
    """Unique among principals."""
    group: str
    """Principals of one group share limits: a tenant's own name, or the host of a connection."""
    is_anonymous: bool = False
    is_trusted: bool = False
    """Code of this process: not limited by shares, and no client can become it."""
    scopes: frozenset[Scope] = ALL_SCOPES
    """Its permissions."""
    limits: TenantLimits = NO_LIMITS
    """Its limits as of its last call."""

    def __eq__(self, other: object) -> bool:
        """Whether they are one client, whatever it may do."""
        return isinstance(other, Principal) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    @property
    def _identity(self) -> tuple[str, str, bool, bool]:
        return self.name, self.group, self.is_anonymous, self.is_trusted

    @property
    def tenant(self) -> str:
        """The tenant's name; "": it is not a tenant."""
        return self.name.removeprefix(_TENANT) if self.name.startswith(_TENANT) else ""


LOCAL = Principal("local", "local", is_trusted=True)
"""Callers in this process."""
INTERNAL = Principal("internal", "internal", is_trusted=True)
"""The server's own requests: canaries."""


Namespace = tuple[str, ...]
"""Requests share cached prefixes only within a namespace."""
SHARED: Namespace = ("shared",)


def namespace_of(principal: Principal, salt: str, *, share_prefixes: bool = False) -> Namespace:
    """The namespace of a request in the prefix cache.

    Args:
        salt: a secret; clients that send the same one share prefixes, tenants' only within the
            tenant. "": none.
        share_prefixes: whether all anonymous clients share their prefixes.
    """
    own = (principal.limits.cache_salt,) if principal.limits.cache_salt else ()
    if salt:
        return ("salt", "" if principal.is_anonymous else principal.name, salt, *own)
    if principal.is_anonymous and share_prefixes:
        return SHARED
    return ("principal", principal.name, *own)


def tenant(
    name: str, scopes: frozenset[Scope] = CONNECTION_SCOPES, limits: TenantLimits = NO_LIMITS
) -> Principal:
    """The tenant `name`, of an API key or of a certificate with that subject."""
    name = f"{_TENANT}{name}"
    return Principal(name, name, scopes=scopes, limits=limits)


def connection(address: str, host: str) -> Principal:
    """An anonymous client; `address` identifies the connection, and `host` its host."""
    name, group = f"connection {address}", f"host {host}"
    return Principal(name, group, is_anonymous=True, scopes=CONNECTION_SCOPES)


def host_of(address: str) -> str:
    """The host of an address: an IPv4 address itself, or the /64 network of an IPv6 address."""
    plain = address.partition("%")[0]
    try:
        parsed = ipaddress.ip_address(plain)
    except ValueError:
        return plain
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.ip_network((parsed, IPV6_HOST_BITS), strict=False))
    return str(parsed)
