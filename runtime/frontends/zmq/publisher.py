"""The thread with the ZeroMQ sockets: publishes engines' event logs to subscribers.

    PUB     topic | number | batch
    ROUTER  a number        ──►  that batch and all after it, then the number -1

A subscriber that falls behind loses batches. It detects that by their numbers, and requests them
again.
"""

import contextlib
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import zmq

from trtc.runtime.engine.kv_events import EventLog
from trtc.runtime.frontends.zmq.messages import EventFormat, encoder
from trtc.runtime.host.background import lower_priority

_log = logging.getLogger("trtc.server")

HIGH_WATER_MARK = 100_000
"""Most messages that wait for one subscriber; further ones are dropped."""
MAX_WAITING_REPLAYS = 100
"""Most requests for replays that wait here; further ones wait at their clients."""
MAX_MESSAGE_BYTES = 1024
"""Most bytes of a client's message: a subscription, or a number."""
MAX_REPLAY_BYTES = 64 << 20
"""Bytes of the last batches of one engine that are kept for replays."""
REPLAY_PAUSE_S = 0.05
"""Seconds between two replays: sending all kept batches takes about as long."""
LINGER_MS = 500
"""Milliseconds for the last messages to be sent when the server ends."""
END = (-1).to_bytes(8, "big", signed=True)
"""The number after a replay's last batch."""


@dataclass
class _Source:
    """One engine's log, and the batches of it that were sent."""

    topic: bytes
    log: EventLog
    leave: Callable[[], None]
    before: int
    """Messages of the topic before this engine's: numbers continue those of the previous engine."""
    seen: int = 0
    """Number of the last batch of the log that was sent."""
    sent: deque[tuple[int, bytes]] = field(default_factory=deque)
    num_bytes: int = 0

    def keep(self, number: int, data: bytes) -> None:
        self.sent.append((number, data))
        self.num_bytes += len(data)
        while self.num_bytes > MAX_REPLAY_BYTES and len(self.sent) > 1:
            self.num_bytes -= len(self.sent.popleft()[1])


class Publisher:
    """Publishes logs through bound sockets, which it closes at its end."""

    def __init__(
        self, publish: "zmq.Socket[Any]", replay: "zmq.Socket[Any] | None", how: EventFormat
    ) -> None:
        self._publish = publish
        self._replay = replay
        self._encode = encoder(how)
        self._names_topics = how == "map"
        """Whether a replay's batches have their topics, as since vLLM 0.28."""
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._lock = threading.Lock()
        """Guards the list of sources."""
        self._sources: dict[bytes, _Source] = {}
        self._ends: dict[bytes, int] = {}
        """Topic without an engine -> number of its last message."""
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="trtc-kv-zmq", daemon=True)
        self._thread.start()

    def attach(self, topic: bytes, log: EventLog) -> None:
        """Publish a log from its beginning on. It replaces another log of the topic."""
        with self._lock:
            known = self._sources.get(topic)
            if known is not None and known.log is log:
                return
            if known is not None:
                self._let_go(known)
            before = self._ends.pop(topic, 0)
            self._sources[topic] = _Source(topic, log, log.listen(self._wake), before)
        self._wake()

    def close(self) -> None:
        """Send waiting messages; blocks for up to half a second."""
        self._is_closing = True
        self._wake()
        self._thread.join()
        os.close(self._wake_write)
        os.close(self._wake_read)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # already woken
            os.write(self._wake_write, b"\0")

    def _run(self) -> None:
        lower_priority()
        try:
            self._serve()
        except Exception:  # noqa: BLE001 (a thread's last frame: requests go on)
            _log.exception("KV events are no longer published")
        for source in self._list():
            source.leave()
        for socket in (self._publish, self._replay):
            if socket is not None:
                socket.close(linger=LINGER_MS)

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_read, zmq.POLLIN)
        replays_at = 0.0
        while True:
            is_closing = self._is_closing
            self._send_new()
            if is_closing:
                return
            wait_s = replays_at - time.monotonic()
            may_replay = self._replay is not None and wait_s <= 0
            if may_replay:
                poller.register(self._replay, zmq.POLLIN)
            is_paused = self._replay is not None and not may_replay
            ready = dict(poller.poll(math.ceil(wait_s * 1e3) if is_paused else None))
            if may_replay:
                poller.unregister(self._replay)
            if self._wake_read in ready:
                os.read(self._wake_read, 1 << 16)
            if self._replay is not None and self._replay in ready:
                self._answer(self._replay)
                replays_at = time.monotonic() + REPLAY_PAUSE_S

    def _list(self) -> list[_Source]:
        with self._lock:
            return list(self._sources.values())

    def _send_new(self) -> None:
        for source in self._list():
            batches = source.log.after(source.seen)
            for batch in source.log.snapshot() if batches is None else batches:
                data = self._encode(batch, source.log)
                source.seen = batch.number
                number = source.before + batch.number
                source.keep(number, data)
                self._send(self._publish, (source.topic, _number(number), data))
            if source.log.is_closed and source.seen == source.log.last:
                self._forget(source)

    def _answer(self, socket: "zmq.Socket[Any]") -> None:
        frames = socket.recv_multipart(zmq.NOBLOCK)
        if len(frames) != 3 or len(frames[2]) != 8:
            return  # not of the protocol
        client, _, asked = frames
        self._send_new()
        first = int.from_bytes(asked, "big")
        for source in self._list():
            for number, data in self._since(source, first):
                names = (source.topic,) if self._names_topics else ()
                self._send(socket, (client, b"", *names, _number(number), data))
        self._send(socket, (client, b"", *((b"",) if self._names_topics else ()), END, b""))

    def _since(self, source: _Source, first: int) -> list[tuple[int, bytes]]:
        """Sent batches from number `first` on; a snapshot if they are no longer kept."""
        if source.sent and max(1, first) < source.sent[0][0]:
            snapshot = source.log.snapshot()
            return [(source.before + one.number, self._encode(one, source.log)) for one in snapshot]
        return [one for one in source.sent if one[0] >= first]

    def _forget(self, source: _Source) -> None:
        """Remove a source whose engine has stopped and whose last batch was sent."""
        with self._lock:
            if self._sources.get(source.topic) is source:
                self._let_go(source)

    def _let_go(self, source: _Source) -> None:
        """Remove a source; the caller holds the lock."""
        source.leave()
        del self._sources[source.topic]
        self._ends[source.topic] = source.before + source.seen

    def _send(self, socket: "zmq.Socket[Any]", frames: tuple[bytes, ...]) -> None:
        """Send without blocking: a message for a subscriber that lags is dropped."""
        with contextlib.suppress(zmq.Again):
            socket.send_multipart(frames, zmq.NOBLOCK)


def _number(number: int) -> bytes:
    return number.to_bytes(8, "big")
