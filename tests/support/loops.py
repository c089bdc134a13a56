"""Engine loops over the echo executor, and sinks that remember."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.lazy import LazyEcho
from trtc.protos.errors import TrtcError
from trtc.runtime.engine.loop import Delivery, EngineLoop, LoopConfig
from trtc.runtime.executors.base import Executor
from trtc.runtime.executors.echo import EchoExecutor, EchoOptions
from trtc.runtime.requests.completion import Result, collect
from trtc.runtime.requests.request import GenerationRequest, Output
from trtc.runtime.text.tokenizer import Tokenizer

PYLLAMA = Path(__file__).parents[2] / "examples" / "models" / "pyllama"
PATIENCE_S = 30.0


class Inbox:
    """A sink: what one request was told, and that it was told rightly."""

    def __init__(self) -> None:
        self.outputs: list[Output] = []
        self.error: TrtcError | None = None
        self.deliveries = 0
        self.made_at = time.monotonic()
        self.first_at = 0.0
        """time.monotonic() of the first delivery."""
        self.ended = threading.Event()
        self.first = threading.Event()

    def __call__(self, delivery: Delivery) -> None:
        assert not self.ended.is_set(), "delivered after the end"
        self.deliveries += 1
        self.first_at = self.first_at or time.monotonic()
        if isinstance(delivery, TrtcError):
            self.error = delivery
            self.ended.set()
        else:
            assert delivery, "an empty delivery"
            self.outputs += delivery
            assert all(output.usage is None for output in self.outputs[:-1])
            if delivery[-1].usage is not None:
                self.ended.set()
        self.first.set()

    def wait(self) -> "Inbox":
        assert self.ended.wait(PATIENCE_S), "the request never ended"
        return self

    def result(self) -> Result:
        self.wait()
        assert self.error is None, self.error
        return collect(self.outputs)


class Loop(EngineLoop):
    """An engine loop with a shorter way to submit."""

    def send(self, request: GenerationRequest) -> Inbox:
        inbox = Inbox()
        self.submit(request, inbox)
        return inbox

    def check_integrity(self) -> None:
        """Call it when nothing is live."""
        self._state.check_integrity()
        assert not self._state.has_work
        assert not self._live
        assert not self._sequences
        assert self._queue.num_taken == 0


@contextmanager
def running_loop(
    options: EchoOptions | None = None,
    config: LoopConfig | None = None,
    *,
    text: bool = False,
    ahead: bool = False,
    executor: Executor | None = None,
) -> Iterator[Loop]:
    """A started loop; after the test nothing may have leaked.

    Args:
        text: give it pyllama's tokenizer; the vocabulary must be at most 4096.
        ahead: over an executor that runs ahead.
        executor: in place of one with `options`.
    """
    tokenizer = Tokenizer.load(PYLLAMA) if text else None
    if executor is None:
        executor = LazyEcho(options) if ahead else EchoExecutor(options)
    loop = Loop(executor, tokenizer, config or LoopConfig())
    loop.start()
    try:
        yield loop
        died = not loop.healthy()
        assert loop.drain(PATIENCE_S)
    finally:
        loop.stop()
    if not died:
        loop.check_integrity()
        assert not isinstance(executor, LazyEcho) or executor.num_in_flight == 0
