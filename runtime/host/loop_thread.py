"""An asyncio loop in a thread of its own."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """A thread that runs an asyncio loop from when it is made until `stop`."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """What a coroutine returns or raises, which is run in the thread's loop. Called in another
        loop."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self.loop))

    async def stop(self) -> None:
        """Cancel the loop's tasks and end the thread. Once."""
        self.loop.call_soon_threadsafe(self._stopping.set)
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            runner.run(self._until_stopped())

    async def _until_stopped(self) -> None:
        await self._stopping.wait()
