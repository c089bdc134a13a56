"""A listening socket that limits connections which have not finished their TLS handshake.

The limits of `connections.py` apply only after the handshake. Until then this limit, and the time
limit of the handshake, bound the cost of clients that connect and send nothing.
"""

import contextlib
import socket
from collections import OrderedDict
from typing import Any, Self

MAX_SOCKETS = 256
BACKLOG = 128
"""Connections that the kernel completes before they are accepted."""


class BoundedListener(socket.socket):
    """Accepts every connection; if more than MAX_SOCKETS are not established, the oldest of them is
    shut down."""

    _accepted: OrderedDict[int, socket.socket]
    """Connections that are not established, by file descriptor."""

    @classmethod
    def listen_on(cls, host: str, port: int) -> Self:
        """Listen. `create_server` sets SO_REUSEADDR and leaves SO_REUSEPORT unset, so a port never
        has two servers.

        Raises:
            OSError: the address is not available.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        plain = socket.create_server((host, port), family=family, backlog=BACKLOG)
        listener = cls(plain.family, plain.type, plain.proto, fileno=plain.detach())
        listener._accepted = OrderedDict()
        return listener

    def accept(self) -> tuple[socket.socket, Any]:
        plain, address = super().accept()
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        one = _Accepted(plain.family, plain.type, plain.proto, fileno=plain.detach())
        one.accepted = self._accepted
        self._accepted[one.fileno()] = one
        if len(self._accepted) > MAX_SOCKETS:
            _, oldest = self._accepted.popitem(last=False)
            with contextlib.suppress(OSError):  # its client has gone
                oldest.shutdown(socket.SHUT_RDWR)
        return one, address

    @property
    def num_accepted(self) -> int:
        """Connections that are not established."""
        return len(self._accepted)

    def shut_down_accepted(self) -> None:
        """Shut down connections that are not established; their transports then close."""
        for one in self._accepted.values():
            with contextlib.suppress(OSError):  # its client has gone
                one.shutdown(socket.SHUT_RDWR)

    def established(self, descriptor: int) -> None:
        """Mark a connection as established: `connections.py` limits it from now on."""
        self._accepted.pop(descriptor, None)


class _Accepted(socket.socket):
    """A connection that removes itself from the listener's list when it is closed."""

    accepted: OrderedDict[int, socket.socket]

    def close(self) -> None:
        if self.accepted.get(self.fileno()) is self:
            del self.accepted[self.fileno()]
        super().close()
