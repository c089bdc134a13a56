"""Channel settings that client and server must agree on, and TLS files as credentials."""

from dataclasses import dataclass
from pathlib import Path

import grpc

from trtc.protos.errors import RequestError

MAX_REQUEST_BYTES = 16 << 20
MAX_RESPONSE_BYTES = 64 << 20
KEEPALIVE_S = 30
"""Both sides ping an idle connection this often, so a vanished peer is noticed."""
KEEPALIVE_TIMEOUT_S = 10
MAX_PENDING_CALLS = 1 << 16
MAX_PENDING_S = 600
MIN_CLIENT_PING_S = 5
"""A client that pings oftener than this is sent away."""

CLIENT_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_REQUEST_BYTES),
    ("grpc.max_receive_message_length", MAX_RESPONSE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_S * 1000),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_S * 1000),
    # A generation is not idempotent: sampled again it gives other tokens.
    ("grpc.enable_retries", 0),
)

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    ("grpc.max_send_message_length", MAX_RESPONSE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_S * 1000),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_S * 1000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", MIN_CLIENT_PING_S * 1000),
    # Of more than 1000 calls that no handler has taken yet, and of those that have waited for
    # 30 s, gRPC cancels some without a word; our own limits refuse with one.
    ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
    ("grpc.server_max_unrequested_time_in_server", MAX_PENDING_S),
    # Two servers on one port would share its connections silently.
    ("grpc.so_reuseport", 0),
)


@dataclass(frozen=True)
class ServerTls:
    """PEM files; with `client_ca`, clients must show a certificate that it signed (mTLS)."""

    cert: Path
    key: Path
    client_ca: Path | None = None

    def credentials(self) -> grpc.ServerCredentials:
        """Raises RequestError for an unreadable file."""
        return grpc.ssl_server_credentials(
            [(_read(self.key, "--tls-key"), _read(self.cert, "--tls-cert"))],
            root_certificates=(
                _read(self.client_ca, "--tls-client-ca") if self.client_ca is not None else None
            ),
            require_client_auth=self.client_ca is not None,
        )


@dataclass(frozen=True)
class ClientTls:
    """PEM files. Without `ca` the system's roots are trusted; `cert` and `key` are for mTLS."""

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Raises RequestError for an unreadable file, or a certificate without its key."""
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


def _read(path: Path, option: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RequestError(
            f"cannot read {path} ({error.strerror})", field=option, remedy="Give a PEM file"
        ) from error
