"""Limits the rate of calls that are cancelled before their requests are read, and of calls without
a valid key.

A client can open and cancel calls faster than a server can accept them ("rapid reset",
CVE-2023-44487), and the next call of any client waits behind those that gRPC has accepted. A
cancelled call keeps its stream until its handler has ended, and gRPC's core refuses calls beyond a
connection's streams at almost no cost. So if a host cancels many calls, their handlers end late:
most of the time, all streams of its connections are taken.
"""

import asyncio

RESETS_PER_S = 100
"""Calls of a host that end at once, in the long run."""
BURST = 200
"""Calls that a host may cancel at once without delay: a client may exit with many open calls."""
MAX_HOLD_S = 10.0
MAX_HELD = 2048
"""Most handlers that wait, of all hosts; further ones end at once. Each holds some 25 KB."""


class Resets:
    """Rates follow the generic cell rate algorithm (ITU-T I.371). For one asyncio loop."""

    def __init__(self) -> None:
        self._due: dict[str, float] = {}
        """host -> time at which its rate has allowed all its cancelled calls, if in the future."""
        self._held: set[asyncio.Future[None]] = set()
        self._closed = False

    @property
    def num_held(self) -> int:
        return len(self._held)

    async def hold(self, host: str) -> None:
        """Count a cancelled or refused call of `host`, and wait for as long as it keeps its
        stream."""
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
        """Count such a call; returns the seconds for which it keeps its stream."""
        while self._due and self._due[first := next(iter(self._due))] <= now:
            del self._due[first]
        burst_s = BURST / RESETS_PER_S
        due = max(self._due.pop(host, now), now) + 1 / RESETS_PER_S
        due = self._due[host] = min(due, now + burst_s + MAX_HOLD_S)  # now the last
        return due - now - burst_s

    def close(self) -> None:
        """Let all waiting handlers end, and later ones end at once."""
        self._closed = True
        for released in self._held:
            _release(released)


def _release(released: "asyncio.Future[None]") -> None:
    if not released.done():
        released.set_result(None)
