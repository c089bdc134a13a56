"""Authentication: maps credentials to a principal, for all protocols.

    peer: address, certificate, key ──► Access.admit ──► Principal
                                              └──► UnauthenticatedError, ForbiddenError

A frontend passes the caller's credentials (`Peer`) and the scope that the call requires (`Scope`).
If client certificates are required, a caller needs one; if the server has API keys, a caller needs
a key, and the principal is the key's tenant. Otherwise every caller is accepted. Health probes need
no credentials. Loading and unloading models takes a key with the scope `admin`, or, if the server
has no keys, a caller on this machine.
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
    """File of API keys, which is reloaded when it changes; None: clients need no keys."""
    needs_certificate: bool = False
    """Whether clients must present a certificate."""


OPEN = AccessConfig()
"""No credentials are required."""


class Peer(NamedTuple):
    """Address and credentials of a caller."""

    address: str
    """Identifies the connection."""
    ip: str
    """IP address of the connection, or another word if there is none."""
    subject: str = ""
    """Subject of a client certificate that TLS has verified; "": there is none."""
    key: str = ""
    """The call's API key; "": there is none."""


class Access:
    """Authenticates callers. Thread-safe.

    Args:
        on_refusal: called for each call without valid credentials.

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
        """The principal of a call.

        Raises:
            UnauthenticatedError: a credential is missing or unknown.
            ForbiddenError: the caller has not the scope.
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
        """The principal of a call, without a check of scopes."""
        if self._config.needs_certificate and not peer.subject:
            self._on_refusal()
            raise UnauthenticatedError(
                "the client has presented no certificate",
                remedy="Connect with a certificate that the server's --tls-client-ca has signed",
            )
        if (holder := self.holder(peer.key)) is not None:
            return holder
        if peer.subject:
            return tenant(peer.subject, CERTIFICATE_SCOPES)
        return self.stranger(peer)

    def stranger(self, peer: Peer) -> Principal:
        """The principal of a call that needs no credentials, such as a probe."""
        return _connection(peer.address, peer.ip)

    def holder(self, key: str) -> Principal | None:
        """The tenant of a key; None: the server has no keys.

        Raises:
            UnauthenticatedError: the key is unknown.
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
    """The key in one of the two headers; the first is a bearer token (RFC 6750)."""
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
            "without API keys, only this machine may load and unload models",
            field="authorization",
            remedy="Start the server with --api-keys, and send a key with the scope 'admin'",
        )


@lru_cache(maxsize=4096)
def _connection(address: str, ip: str) -> Principal:
    return connection(address, host_of(ip))
