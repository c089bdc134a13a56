"""Canaries: prompts whose greedy tokens were recorded when the engine was built.

An engine that gives other tokens on this machine computes something else than what was measured,
so it does not serve.
"""

import queue
import time

from trtc.protos.errors import TrtcError
from trtc.protos.manifest import Canary
from trtc.runtime.loop import Delivery
from trtc.runtime.request import GenerationRequest, SamplingParams
from trtc.runtime.server.handle import EngineHandle

CANARY_TIMEOUT_S = 120.0


def why_canaries_fail(handle: EngineHandle, timeout_s: float = CANARY_TIMEOUT_S) -> str:
    """Run the engine's canaries; "" when all give their tokens. Blocks: call it in a thread."""
    deadline = time.monotonic() + timeout_s
    for number, canary in enumerate(handle.manifest.canaries):
        try:
            tokens = _run(handle, f"canary-{number}", canary, deadline)
        except TrtcError as error:
            return f"canary {number} could not run: {error}"
        except queue.Empty:
            return f"canary {number} took longer than {timeout_s:g} s"
        if tokens != canary.token_ids:
            at = _first_difference(tokens, canary.token_ids)
            return (
                f"canary {number} gives other tokens than at build, first at position {at}: "
                f"{tokens[at : at + 1]} instead of {canary.token_ids[at : at + 1]}"
            )
    return ""


def _run(handle: EngineHandle, request_id: str, canary: Canary, deadline: float) -> tuple[int, ...]:
    """Raises queue.Empty at the deadline, and whatever ends the request."""
    deliveries: queue.SimpleQueue[Delivery] = queue.SimpleQueue()
    handle.loop.submit(
        GenerationRequest(
            request_id=request_id,
            prompt_ids=canary.prompt_ids,
            sampling=SamplingParams(temperature=0.0),
            max_tokens=len(canary.token_ids),
            ignore_eos=True,  # the recorded tokens may go past an end-of-sequence token
        ),
        deliveries.put,
    )
    tokens: list[int] = []
    while True:
        delivery = deliveries.get(timeout=max(deadline - time.monotonic(), 0))
        if isinstance(delivery, TrtcError):
            raise delivery
        for output in delivery:
            tokens.extend(output.token_ids)
            if output.usage is not None:
                return tuple(tokens)


def _first_difference(ours: tuple[int, ...], theirs: tuple[int, ...]) -> int:
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
