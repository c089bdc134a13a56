"""Channel settings that client and server must agree on."""

MAX_RESPONSE_BYTES = 64 << 20
KEEPALIVE_S = 30
"""Both sides ping an idle connection this often, so a vanished peer is noticed."""
KEEPALIVE_TIMEOUT_S = 10
MAX_PENDING_S = 600
STORMING_CONNECTIONS = 32
"""Connections whose calls may all wait for a handler before gRPC drops any call unheard."""
HANDSHAKE_S = 10
"""A connection that has not said what it is by then is closed."""
IDLE_CONNECTION_S = 600
"""A connection without calls is closed after this time; client libraries connect again."""
MIN_CLIENT_PING_S = 5
"""A client that pings oftener than this is sent away."""

CLIENT_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_RESPONSE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_S * 1000),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_S * 1000),
    # Two clients of one process are two connections: the server tells clients apart by them.
    ("grpc.use_local_subchannel_pool", 1),
    # A generation is not idempotent: sampled again it gives other tokens.
    ("grpc.enable_retries", 0),
)


def server_options(
    *, max_connection_calls: int, max_connections: int, max_request_bytes: int
) -> tuple[tuple[str, int], ...]:
    """Channel arguments of a server.

    A call counts from its first frame until its handler has ended, even if it was cancelled at
    once. So of a client that opens and cancels without end, no more than `max_connection_calls` a
    connection wait for handlers, in one line with the calls of others; gRPC's core refuses the
    rest.
    """
    # Of more calls than this that no handler has taken yet (1000 by default), and of those that
    # have waited for 30 s, gRPC cancels some without a word, whosesoever they are.
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
