"""TLS: PEM files as the credentials of gRPC and as a context of Python's `ssl`.

A server checks its files whenever a client connects, so certificates are rotated by replacing the
files. Open connections keep their certificate.
"""

import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc

from trtc.protos.errors import RequestError
from trtc.protos.files import UnreadableError, read_file
from trtc.runtime.host.reloaded import Reloaded

MAX_PEM_BYTES = 1 << 20


@dataclass(frozen=True)
class ServerTls:
    """PEM files; with `client_ca`, clients must present a certificate signed by it (mTLS)."""

    cert: Path
    key: Path
    client_ca: Path | None = None

    @property
    def paths(self) -> tuple[Path, ...]:
        return (self.cert, self.key, *((self.client_ca,) if self.client_ca is not None else ()))

    def credentials(self) -> grpc.ServerCredentials:
        """Credentials of a gRPC port.

        Raises:
            RequestError: a file cannot be read, is not PEM, or key and certificate do not match.
        """
        configurations = Reloaded(self.paths, self._grpc_configuration)
        return grpc.dynamic_ssl_server_credentials(
            configurations.get(),
            _changes(configurations.get),  # type: ignore[arg-type]  # the stubs forget None
            require_client_authentication=self.client_ca is not None,
        )

    def context(self) -> ssl.SSLContext:
        """An SSLContext for an HTTP/1.1 port. Clients without a certificate can connect, because
        probes have none; the application decides what they may do.

        Raises:
            RequestError: see `credentials`.
        """
        contexts = Reloaded(self.paths, self._ssl_context)

        def choose(
            connection: ssl.SSLSocket | ssl.SSLObject, name: str | None, first: ssl.SSLContext
        ) -> None:
            connection.context = contexts.get()

        # Called for every client, with or without SNI, before a certificate is sent.
        door = self._ssl_context()
        door.sni_callback = choose
        return door

    def _ssl_context(self) -> ssl.SSLContext:
        self._read()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_alpn_protocols(["http/1.1"])
        try:
            # Without a password, OpenSSL would prompt for that of an encrypted key.
            context.load_cert_chain(self.cert, self.key, password="")
        except (OSError, ValueError) as error:
            raise RequestError(
                f"{self.cert} and {self.key} are no certificate with its key ({_reason(error)})",
                field="--tls-cert",
                remedy="Give a PEM certificate chain, and its PEM key without a password",
            ) from error
        if self.client_ca is not None:
            context.verify_mode = ssl.CERT_OPTIONAL
            try:
                context.load_verify_locations(self.client_ca)
            except (OSError, ValueError) as error:
                raise RequestError(
                    f"{self.client_ca} has no certificates ({_reason(error)})",
                    field="--tls-client-ca",
                    remedy="Give PEM certificates",
                ) from error
        return context

    def _grpc_configuration(self) -> grpc.ServerCertificateConfiguration:
        self._ssl_context()  # gRPC's own errors for mismatched files have no details
        key, cert, client_ca = self._read()
        return grpc.ssl_server_certificate_configuration([(key, cert)], client_ca)

    def _read(self) -> tuple[bytes, bytes, bytes | None]:
        return (
            _read(self.key, "--tls-key"),
            _read(self.cert, "--tls-cert"),
            _read(self.client_ca, "--tls-client-ca") if self.client_ca is not None else None,
        )


@dataclass(frozen=True)
class ClientTls:
    """PEM files. Without `ca`, gRPC's built-in public roots are trusted; `cert` and `key` are for
    mTLS."""

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Channel credentials; raises RequestError for an unreadable file, or a certificate without
        its key."""
        if (self.cert is None) != (self.key is None):
            raise RequestError(
                "a client certificate and its key go together",
                field="--tls-cert" if self.cert is None else "--tls-key",
                remedy="Give both or neither",
            )
        return grpc.ssl_channel_credentials(
            root_certificates=_read(self.ca, "--tls-ca") if self.ca is not None else None,
            private_key=_read(self.key, "--tls-key") if self.key is not None else None,
            certificate_chain=_read(self.cert, "--tls-cert") if self.cert is not None else None,
        )


def _changes(
    get: Callable[[], grpc.ServerCertificateConfiguration],
) -> Callable[[], grpc.ServerCertificateConfiguration | None]:
    """A certificate fetcher for gRPC: returns the configuration if it has changed, else None."""
    lock = threading.Lock()
    loaded = get()

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal loaded
        with lock:
            last, loaded = loaded, get()
            return None if loaded is last else loaded

    return fetch


def _read(path: Path, option: str) -> bytes:
    try:
        return read_file(path, MAX_PEM_BYTES)
    except UnreadableError as error:
        raise RequestError(f"{path} {error}", field=option, remedy="Give a PEM file") from error


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", None) or getattr(error, "strerror", None) or error)
