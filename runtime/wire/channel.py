"""Channel settings that client and server must agree on."""

MAX_RESPONSE_BYTES = 64 << 20
KEEPALIVE_S = 30
"""Seconds between pings of an idle connection by both sides, to detect a dead peer."""
KEEPALIVE_TIMEOUT_S = 10
MAX_PENDING_S = 600
STORMING_CONNECTIONS = 32
"""Number of connections all of whose calls may wait for handlers before gRPC drops calls."""
HANDSHAKE_S = 10
"""Seconds for a connection's handshake, after which it is closed."""
IDLE_CONNECTION_S = 600
"""Seconds after which a connection without calls is closed; client libraries reconnect."""
MIN_CLIENT_PING_S = 5
"""Least seconds between pings of a client; one that pings more often is disconnected."""

CLIENT_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_RESPONSE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_S * 1000),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_S * 1000),
    # Separate connections for clients of one process, because the server identifies clients by
    # connection.
    ("grpc.use_local_subchannel_pool", 1),
    # Generation is not idempotent: another run samples other tokens.
    ("grpc.enable_retries", 0),
)


def server_options(
    *, max_connection_calls: int, max_connections: int, max_request_bytes: int
) -> tuple[tuple[str, int], ...]:
    """Channel arguments of a server.

    A call counts from its first frame until its handler has ended, even if it was cancelled at
    once. So if a client opens and cancels calls in a loop, at most `max_connection_calls` per
    connection wait for handlers, in one queue with the calls of others; gRPC's core refuses the
    rest.
    """
    # If more calls than this wait for handlers (1000 by default), or for 30 s, gRPC silently
    # cancels some, of any client.
    max_pending = STORMING_CONNECTIONS * max_connection_calls
    return (
        ("grpc.max_receive_message_length", max_request_bytes),
        ("grpc.max_send_message_length", MAX_RESPONSE_BYTES),
        ("grpc.keepalive_time_ms", KEEPALIVE_S * 1000),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_S * 1000),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", MIN_CLIENT_PING_S * 1000),
        ("grpc.max_concurrent_streams", max_connection_calls),
        ("grpc.max_allowed_incoming_connections", max_connections),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_S * 1000),
        ("grpc.max_connection_idle_ms", IDLE_CONNECTION_S * 1000),
        ("grpc.server.max_pending_requests", max_pending),
        ("grpc.server.max_pending_requests_hard_limit", max_pending),
        ("grpc.server_max_unrequested_time_in_server", MAX_PENDING_S),
        # Two servers on one port would share its connections silently.
        ("grpc.so_reuseport", 0),
    )
