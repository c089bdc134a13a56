"""Limits how many connections of the gRPC port one host may hold.

gRPC limits the connections of a port only, so that one host could take all of them, and it does not
say which connections there are. So the process's sockets are searched while there are as many that
a host could hold too many. The newest connections of such a host are shut down.
"""

import asyncio
import os
import socket
from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

from trtc.runtime.requests.principal import host_of

HOST_SHARE = 0.75
"""Share of the port's connections that one host may hold."""
LOOK_S = 1.0
"""Seconds between two searches."""
CROWDED_LOOK_S = 0.1
"""The same after a search that has shut a connection down: its host may open more."""
_FILES = Path("/proc/self/fd")

Peer = tuple[str, int]
"""A client's address and port."""


class HostConnections:
    """Watches the connections of a port.

    Args:
        port: the server's.
        max_connections: the most of all hosts.
    """

    def __init__(self, port: int, max_connections: int) -> None:
        self._port = port
        self._most = max(1, int(max_connections * HOST_SHARE))
        self._known: list[Peer] = []
        """Those of the last search, oldest first."""

    async def watch(self) -> None:
        """Search until cancelled; on systems without /proc there is no limit of a host."""
        while _FILES.is_dir():
            # A search takes 30 us a connection.
            is_crowded = await asyncio.to_thread(self.limit)
            await asyncio.sleep(CROWDED_LOOK_S if is_crowded else LOOK_S)

    def limit(self) -> bool:
        """Shut down what hosts hold beyond their share; returns whether there was any."""
        files = [int(one.name) for one in _FILES.iterdir()]
        if len(files) <= self._most:
            self._known = []
            return False
        with ExitStack() as opened:
            found: dict[Peer, socket.socket] = {}
            for file in files:
                with suppress(OSError):  # closed meanwhile, or no connection
                    peer, one = self._connection(file, opened)
                    if peer is not None:
                        found[peer] = one
            return self._limit(found)

    def _limit(self, found: Mapping[Peer, socket.socket]) -> bool:
        self._known = [peer for peer in self._known if peer in found]
        self._known += found.keys() - self._known
        by_host: dict[str, list[Peer]] = defaultdict(list)
        for peer in self._known:
            by_host[host_of(peer[0])].append(peer)
        excess = [peer for peers in by_host.values() for peer in peers[self._most :]]
        for peer in excess:
            with suppress(OSError):  # it has ended
                found[peer].shutdown(socket.SHUT_RDWR)
        return bool(excess)

    def _connection(self, file: int, opened: ExitStack) -> tuple[Peer | None, socket.socket]:
        """A duplicate of a socket, which stays what it is if the file is closed, and its client;
        None: it is not a connection of the port.

        Raises:
            OSError: the file is closed, not a socket, or not connected.
        """
        descriptor = os.dup(file)
        try:
            one = socket.socket(fileno=descriptor)
        except OSError:
            os.close(descriptor)
            raise
        opened.enter_context(one)
        if one.family not in (socket.AF_INET, socket.AF_INET6):
            return None, one
        address, port = one.getpeername()[:2]
        return (address, port) if one.getsockname()[1] == self._port else None, one
