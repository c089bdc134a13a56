"""Connections as they are accepted."""

import socket

from trtc.runtime.frontends.http.listener import BoundedListener


def test_what_is_written_is_sent_at_once() -> None:
    """asyncio sees to it for sockets whose protocol is named, which `create_server` leaves open.
    Otherwise each write waits for the client to confirm the last one, for 40 ms where it can."""
    with (
        BoundedListener.listen_on("127.0.0.1", 0) as listener,
        socket.create_connection(listener.getsockname()),
    ):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
