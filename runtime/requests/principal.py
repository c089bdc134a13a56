"""Who sent a request: ids, cached prefixes and shares of resources belong to a principal."""

import enum
import ipaddress
from dataclasses import dataclass, field

from trtc.runtime.requests.tenant_limits import NO_LIMITS, TenantLimits

_TENANT = "tenant "
IPV6_HOST_BITS = 64
"""Of an IPv6 address: one host may use any address of its network."""


class Scope(enum.Enum):
    """What a port's paths and methods are for."""

    INFERENCE = "inference"
    METRICS = "metrics"
    EVENTS = "events"
    """Which prefixes are cached: the token ids of everybody's prompts."""
    ADMIN = "admin"
    """Models come and go, sleep and wake."""


ALL_SCOPES = frozenset(Scope)
CONNECTION_SCOPES = ALL_SCOPES - {Scope.ADMIN}
"""Of an anonymous client."""
CERTIFICATE_SCOPES = CONNECTION_SCOPES - {Scope.EVENTS}
"""Of a client certificate without a key."""


@dataclass(frozen=True)
class Principal:
    """One client, as the protocol that it speaks identifies it.

    Two kinds come over the network: a tenant, whom an API key or a client certificate names,
    wherever it connects from; and a connection, which is all that is known of an anonymous client.
    """

    name: str
    """Unique among principals."""
    group: str
    """What bounded resources count together: a tenant's own name, or the host of a connection."""
    is_anonymous: bool = False
    is_trusted: bool = False
    """Code of this process: no share limits it, and no client can name it."""
    scopes: frozenset[Scope] = field(default=ALL_SCOPES, compare=False)
    """What it may ask for."""
    limits: TenantLimits = field(default=NO_LIMITS, compare=False)
    """As its last call found them."""

    @property
    def tenant(self) -> str:
        """The tenant's name; "": this is none."""
        return self.name.removeprefix(_TENANT) if self.name.startswith(_TENANT) else ""


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
    own = (principal.limits.cache_salt,) if principal.limits.cache_salt else ()
    if salt:
        return ("salt", "" if principal.is_anonymous else principal.name, salt, *own)
    if principal.is_anonymous and share_prefixes:
        return SHARED
    return ("principal", principal.name, *own)


def tenant(
    name: str, scopes: frozenset[Scope] = CONNECTION_SCOPES, limits: TenantLimits = NO_LIMITS
) -> Principal:
    """The holder of an API key of the tenant `name`, or of a certificate with that subject."""
    name = f"{_TENANT}{name}"
    return Principal(name, name, scopes=scopes, limits=limits)


def connection(address: str, host: str) -> Principal:
    """An anonymous client; `address` names its connection, `host` where that comes from."""
    name, group = f"connection {address}", f"host {host}"
    return Principal(name, group, is_anonymous=True, scopes=CONNECTION_SCOPES)


def host_of(address: str) -> str:
    """What counts as one host: an IPv4 address, the network of an IPv6 address."""
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
