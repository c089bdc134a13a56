"""Canaries: prompts whose greedy tokens were recorded when the engine was built.

An engine that gives other tokens on this machine computes something else than what was measured,
so it does not serve.
"""

import queue
import time
from collections.abc import Sequence
from itertools import zip_longest

from trtc.protos.errors import TrtcError
from trtc.protos.manifest import Canary
from trtc.protos.sampling import SamplingParams
from trtc.runtime.engine.handle import EngineHandle
from trtc.runtime.engine.loop import Delivery
from trtc.runtime.requests.principal import INTERNAL
from trtc.runtime.requests.request import GenerationRequest

CANARY_TIMEOUT_S = 120.0
_MIN_SAME = 0.25
"""Share of all canaries' tokens that come before near ties. A GPU engine in E4M3 gives about 5% of
its CPU twin's tokens otherwise: nine canaries that all end within a quarter of their tokens happen
to one healthy engine in ten thousand."""


def why_canaries_fail(handle: EngineHandle, timeout_s: float = CANARY_TIMEOUT_S) -> str:
    """Run the engine's canaries; "" when all give their tokens. Blocks: call it in a thread."""
    deadline = time.monotonic() + timeout_s
    manifest = handle.manifest
    under_way = [
        (canary, _submit(handle, f"canary-{number}", canary))
        for number, canary in enumerate(manifest.canaries)
    ]
    num_same = 0
    for number, (canary, deliveries) in enumerate(under_way):
        try:
            tokens = _tokens(deliveries, deadline)
        except TrtcError as error:
            return f"canary {number} could not run: {error}"
        except queue.Empty:
            return f"canary {number} took longer than {timeout_s:g} s"
        same, is_right = compare(tokens, canary, manifest.canary_tolerance)
        if not is_right:
            return (
                f"canary {number} gives other tokens than at build, first at position {same}: "
                f"{tokens[same : same + 1]} instead of {canary.token_ids[same : same + 1]}"
            )
        num_same += same
    return why_too_few(num_same, manifest.canaries)


def compare(tokens: Sequence[int], canary: Canary, tolerance: float) -> tuple[int, bool]:
    """How many leading tokens are those of the canary, and whether a healthy engine may go on as
    this one did.

    Another token where the recorded one led by less than `tolerance` logits is a rounding tie: what
    follows continues another text and is not compared. The first token is never a tie.
    """
    pairs = enumerate(zip_longest(tokens, canary.token_ids))
    at = next((at for at, (ours, theirs) in pairs if ours != theirs), None)
    if at is None:
        return len(tokens), True
    can_tie = 0 < at < min(len(tokens), len(canary.margins))
    return at, can_tie and canary.margins[at] < tolerance


def why_too_few(num_same: int, canaries: Sequence[Canary]) -> str:
    """Why so few equal tokens are no sign of a healthy engine; "" when they are enough.

    Rounding rarely ends a canary early; an engine that computes something else ends most of them at
    their first near tie.
    """
    num_recorded = sum(len(canary.token_ids) for canary in canaries)
    if num_same >= _MIN_SAME * num_recorded:
        return ""
    return f"canaries give {num_same} of {num_recorded} tokens before they differ, too few"


def _submit(handle: EngineHandle, request_id: str, canary: Canary) -> queue.SimpleQueue[Delivery]:
    deliveries: queue.SimpleQueue[Delivery] = queue.SimpleQueue()
    try:
        handle.loop.submit(
            GenerationRequest(
                request_id=request_id,
                prompt_ids=canary.prompt_ids,
                sampling=SamplingParams(temperature=0.0),
                max_tokens=len(canary.token_ids),
                principal=INTERNAL,
                ignore_eos=True,  # the recorded tokens may go past an end-of-sequence token
            ),
            deliveries.put,
        )
    except TrtcError as error:
        deliveries.put(error)
    return deliveries


def _tokens(deliveries: queue.SimpleQueue[Delivery], deadline: float) -> tuple[int, ...]:
    """Raises queue.Empty at the deadline, and whatever ends the request."""
    tokens: list[int] = []
    while True:
        delivery = deliveries.get(timeout=max(deadline - time.monotonic(), 0))
        if isinstance(delivery, TrtcError):
            raise delivery
        for output in delivery:
            tokens.extend(output.token_ids)
            if output.usage is not None:
                return tuple(tokens)
