"""Requests of token ids to an engine's loop, all at once."""

import threading
from collections.abc import Callable, Sequence

from trtc.protos.errors import TrtcError
from trtc.runtime.engine.emission import Delivery
from trtc.runtime.engine.loop import EngineLoop
from trtc.runtime.requests.completion import collect
from trtc.runtime.requests.request import GenerationRequest, Output

_PATIENCE_S = 120


def serve(loop: EngineLoop, requests: Sequence[GenerationRequest]) -> list[tuple[int, ...] | str]:
    """The tokens that each request's first sequence was given, or what went wrong."""
    found: list[tuple[int, ...] | str] = ["never ended"] * len(requests)
    ended = threading.Semaphore(0)

    def sink_of(number: int) -> Callable[[Delivery], None]:
        outputs: list[Output] = []

        def sink(delivery: Delivery) -> None:
            if isinstance(delivery, TrtcError):
                found[number] = str(delivery)
                ended.release()
                return
            outputs.extend(delivery)
            if delivery[-1].usage is not None:
                found[number] = tuple(collect(outputs).completions[0].token_ids)
                ended.release()

        return sink

    for number, request in enumerate(requests):
        loop.submit(request, sink_of(number))
    for _ in requests:
        if not ended.acquire(timeout=_PATIENCE_S):
            break
    return found
