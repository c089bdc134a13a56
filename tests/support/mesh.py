"""Collectives between processes without a GPU: everyone sends everyone what it has."""

import json
import socket
import time
from pathlib import Path

import ml_dtypes
import numpy as np

from trtc.builder.recipes import Array

_PATIENCE_S = 30.0
_DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}


class Mesh:
    """One rank's sockets to all others. A rank that is gone makes every exchange fail."""

    def __init__(self, directory: Path, rank: int, ranks: int) -> None:
        """Meet the others in a directory; blocks until all are there."""
        self._rank = rank
        self._peers: dict[int, socket.socket] = {}
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(directory / str(rank)))
            listener.listen(ranks)
            listener.settimeout(_PATIENCE_S)
            for other in range(rank):
                self._peers[other] = _connect(directory / str(other), rank)
            while len(self._peers) < ranks - 1:
                peer, _ = listener.accept()
                self._peers[peer.recv(1)[0]] = peer

    def exchange(self, node: str, given: Array) -> tuple[Array, ...]:
        """The evaluator's Exchange."""
        head = json.dumps([node, given.dtype.name, given.shape]).encode()
        content = np.ascontiguousarray(given).tobytes()
        for peer in self._peers.values():
            peer.sendall(b"%8d%8d" % (len(head), len(content)) + head + content)
        everyone = {self._rank: given}
        for rank, peer in self._peers.items():
            sizes = _read(peer, 16)
            (name, dtype, shape) = json.loads(_read(peer, int(sizes[:8])))
            assert name == node, f"rank {rank} is at {name}, rank {self._rank} at {node}"
            values = np.frombuffer(_read(peer, int(sizes[8:])), _DTYPES[dtype])
            everyone[rank] = values.reshape(shape)
        return tuple(everyone[rank] for rank in sorted(everyone))

    def close(self) -> None:
        """From any thread: whoever waits here gets an error."""
        for peer in self._peers.values():
            try:
                peer.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # the other end is gone
            finally:
                peer.close()


def _connect(path: Path, rank: int) -> socket.socket:
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        peer = socket.socket(socket.AF_UNIX)
        try:
            peer.connect(str(path))
        except OSError:
            peer.close()
            assert time.monotonic() < deadline, f"nobody at {path}"
            time.sleep(0.01)
        else:
            peer.sendall(bytes([rank]))
            return peer


def _read(peer: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = peer.recv(size - len(data))
        if not part:
            raise ConnectionError("a peer is gone")
        data += part
    return data
