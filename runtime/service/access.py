"""Who may call: credentials become a principal, in one place for every protocol.

    peer: address, certificate, key ──► Access.admit ──► Principal
                                              └──► UnauthenticatedError, ForbiddenError

A frontend says what its protocol knows of a caller (`Peer`), and what the call is for (`Scope`).
Where clients must have certificates, they need one; where the server has API keys, they need a key,
whose tenant then is who calls. Else everybody may call. Probes of health are open everywhere.
Models come and go by order of keys that may do so, and of this machine where there are no keys.
"""

import ipaddress
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from trtc.protos.errors import ForbiddenError, UnauthenticatedError
from trtc.runtime.host.reloaded import Reloaded
from trtc.runtime.requests.principal import (
    CERTIFICATE_SCOPES,
    Principal,
    Scope,
    connection,
    host_of,
    tenant,
)
from trtc.runtime.service.api_keys import KeyTable, read_keys


@dataclass(frozen=True)
class AccessConfig:
    api_keys: Path | None = None
    """Read again whenever it changes; None: clients need no keys."""
    needs_certificate: bool = False
    """Whether clients must have shown a certificate."""


OPEN = AccessConfig()
"""Everybody may call."""


class Peer(NamedTuple):
    """What a protocol knows of a caller."""

    address: str
    """Names the connection."""
    ip: str
    """Where that comes from; any other word where there is no IP address."""
    subject: str = ""
    """Of a client certificate that TLS has verified; "": none was shown."""
    key: str = ""
    """The API key that came with the call; "": none did."""


class Access:
    """Thread-safe.

    Args:
        on_refusal: called for each call that nobody is known to have made.

    Raises:
        RequestError: the file of keys cannot be read.
    """

    def __init__(
        self, config: AccessConfig = OPEN, on_refusal: Callable[[], object] = lambda: None
    ) -> None:
        self._config = config
        self._on_refusal = on_refusal
        path = config.api_keys
        self._keys = None if path is None else Reloaded([path], lambda: KeyTable(read_keys(path)))

    @property
    def needs_keys(self) -> bool:
        return self._keys is not None

    def admit(self, peer: Peer, scope: Scope = Scope.INFERENCE) -> Principal:
        """Who calls.

        Raises:
            UnauthenticatedError: a credential is missing or unknown.
            ForbiddenError: the caller may not ask for `scope`.
        """
        principal = self.identify(peer)
        if scope is Scope.ADMIN and not self.needs_keys:
            _check_is_local(peer)
            return principal
        if scope not in principal.scopes:
            raise ForbiddenError(
                f"the {'key' if self.needs_keys else 'certificate'} may not be used for "
                f"{scope.value}",
                field="authorization",
                remedy=f"Use a key of a tenant whose scopes have {scope.value!r}",
            )
        return principal

    def identify(self, peer: Peer) -> Principal:
        """The same, whatever the call is for."""
        if self._config.needs_certificate and not peer.subject:
            self._on_refusal()
            raise UnauthenticatedError(
                "the client has shown no certificate",
                remedy="Connect with a certificate that the server's --tls-client-ca has signed",
            )
        if (holder := self.holder(peer.key)) is not None:
            return holder
        if peer.subject:
            return tenant(peer.subject, CERTIFICATE_SCOPES)
        return self.stranger(peer)

    def stranger(self, peer: Peer) -> Principal:
        """Who calls, whatever credentials there are: for probes, which need none."""
        return _connection(peer.address, peer.ip)

    def holder(self, key: str) -> Principal | None:
        """Whose key it is; None: the server has no keys.

        Raises:
            UnauthenticatedError: nobody's.
        """
        if self._keys is None:
            return None
        principal = self._keys.get().find(key) if key else None
        if principal is None:
            self._on_refusal()
            raise UnauthenticatedError(
                "the API key is not known, or has expired" if key else "an API key is missing",
                field="authorization",
                remedy="Send `authorization: Bearer KEY` or `x-api-key: KEY`",
            )
        return principal


def api_key(authorization: str, x_api_key: str) -> str:
    """The key that the two headers give; the first is that of OAuth (RFC 6750)."""
    scheme, _, credential = authorization.strip().partition(" ")
    if scheme.lower() == "bearer":
        return credential.strip()
    return x_api_key.strip()


def _check_is_local(peer: Peer) -> None:
    """Raises ForbiddenError unless a caller is on this machine."""
    try:
        is_local = ipaddress.ip_address(peer.ip).is_loopback
    except ValueError:
        is_local = peer.ip == "unix"
    if not is_local:
        raise ForbiddenError(
            "without keys, models come and go by order of this machine alone",
            field="authorization",
            remedy="Start the server with --api-keys, and send a key with the scope 'admin'",
        )


@lru_cache(maxsize=4096)
def _connection(address: str, ip: str) -> Principal:
    return connection(address, host_of(ip))
