"""One end of a socket pair between two ranks: messages with length prefixes."""

import socket
import threading
from typing import Generic, TypeVar

import msgspec

_T = TypeVar("_T")
_LENGTH_BYTES = 4


def frame(message: msgspec.Struct) -> bytes:
    """The bytes of a message, with its length."""
    content = msgspec.msgpack.encode(message)
    return len(content).to_bytes(_LENGTH_BYTES, "little") + content


class Link(Generic[_T]):
    """Sends from any thread; receives messages of one type from one thread."""

    def __init__(self, end: socket.socket, received: object) -> None:
        """`received`: the type, or union of types, of the other end's messages."""
        self.socket = end
        self._sending = threading.Lock()
        self._decoder: msgspec.msgpack.Decoder[_T] = msgspec.msgpack.Decoder(received)

    def send(self, message: msgspec.Struct) -> None:
        """Raises: OSError: the other end is closed, or reads nothing in the socket's timeout."""
        self.send_frame(frame(message))

    def send_frame(self, content: bytes) -> None:
        """Send the result of `frame`; raises the errors of `send`."""
        with self._sending:
            self.socket.sendall(content)

    def receive(self) -> _T | None:
        """The next message; None: the other end is closed.

        Raises:
            OSError: a message is incomplete after the socket's timeout.
            msgspec.DecodeError: it is not a message.
        """
        head = self._read(_LENGTH_BYTES)
        content = self._read(int.from_bytes(head, "little")) if head else None
        return self._decoder.decode(content) if content else None

    def close(self) -> None:
        self.socket.close()

    def _read(self, size: int) -> bytes | None:
        parts, left = [], size
        while left:
            try:
                part = self.socket.recv(left)
            except ConnectionError:
                return None
            if not part:
                return None
            parts.append(part)
            left -= len(part)
        return b"".join(parts)
