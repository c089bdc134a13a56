"""Connections as they are accepted."""

import asyncio
import gc
import socket
import sys

import pytest

from tests.support.servers import echo_server
from trtc.runtime.frontends.http.listener import BoundedListener, _Accepted


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


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 50])
def test_a_server_that_closes_with_its_first_connections_leaves_none(
    turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some are accepted by then, and have no transport yet."""
    for name in [
        one for one in sys.modules if one.startswith("trtc.runtime.frontends.http.server")
    ]:
        monkeypatch.delitem(sys.modules, name)  # so that connections wait for its import

    async def port_of_a_server_that_was_left() -> int:
        async with echo_server() as server:
            for _ in range(20):
                socket.create_connection(("127.0.0.1", server.http_port)).close()
            for _ in range(turns):
                await asyncio.sleep(0)
            return server.http_port

    port = asyncio.run(port_of_a_server_that_was_left())
    accepted = [one for one in gc.get_objects() if type(one) is _Accepted]
    still_open = [one for one in accepted if one.fileno() != -1]  # other tests have servers too
    assert [one for one in still_open if one.getsockname()[1] == port] == []
