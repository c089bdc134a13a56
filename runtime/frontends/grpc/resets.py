"""Calls that clients cancel before their requests are read, and calls of clients without a key: so
many a second end, the others late.

A client can open and cancel calls faster than any server takes them ("rapid reset",
CVE-2023-44487), and everybody's next call waits behind those that gRPC has accepted. A cancelled
call keeps its stream until its handler has ended, and what a connection opens beyond its streams is
refused by gRPC's core, which costs next to nothing. So where many come from a host, their handlers
end late: a storm's connections have all of their streams taken most of the time.
"""

import asyncio

RESETS_PER_S = 100
"""Of a host, in the long run."""
BURST = 200
"""Calls that a host may cancel at once, unread, at no cost: a client may end with many open."""
MAX_HOLD_S = 10.0
MAX_HELD = 2048
"""Handlers that wait at a time, of all hosts; beyond, they end at once. Each holds some 25 KB."""


class Resets:
    """Rates follow the generic cell rate algorithm (ITU-T I.371). For one asyncio loop."""

    def __init__(self) -> None:
        self._due: dict[str, float] = {}
        """host -> when its rate would have allowed all that it has cancelled, if in the future."""
        self._held: set[asyncio.Future[None]] = set()
        self._closed = False

    @property
    def num_held(self) -> int:
        return len(self._held)

    async def hold(self, host: str) -> None:
        """A call of `host` is to end for nothing: wait for as long as it keeps its stream."""
        loop = asyncio.get_running_loop()
        seconds = self.count(host, loop.time())
        if seconds <= 0 or self._closed or len(self._held) >= MAX_HELD:
            return
        released = loop.create_future()
        self._held.add(released)
        timer = loop.call_later(seconds, _release, released)
        try:
            await released
        finally:
            timer.cancel()
            self._held.discard(released)

    def count(self, host: str, now: float) -> float:
        """Count such a call; the seconds for which it keeps its stream."""
        while self._due and self._due[first := next(iter(self._due))] <= now:
            del self._due[first]
        burst_s = BURST / RESETS_PER_S
        due = max(self._due.pop(host, now), now) + 1 / RESETS_PER_S
        due = self._due[host] = min(due, now + burst_s + MAX_HOLD_S)  # now the last
        return due - now - burst_s

    def close(self) -> None:
        """Let all handlers end, now and from now on."""
        self._closed = True
        for released in self._held:
            _release(released)


def _release(released: "asyncio.Future[None]") -> None:
    if not released.done():
        released.set_result(None)
