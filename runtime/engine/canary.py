"""Canaries: prompts whose greedy tokens were recorded when the engine was built.

An engine that gives other tokens on this machine does not compute what was measured, so it does not
become ready.
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
"""Least share of all canaries' tokens that must be equal. A GPU engine in E4M3 gives about 5% other
tokens than its CPU twin, so the probability that all of nine canaries of a healthy engine end
within a quarter of their tokens is about 1e-4."""


def why_canaries_fail(handle: EngineHandle, timeout_s: float = CANARY_TIMEOUT_S) -> str:
    """Run the engine's canaries; "" if all give the recorded tokens. Blocks: call in a thread."""
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
    """How many leading tokens equal the canary's, and whether a healthy engine may continue as this
    one did.

    A different token where the recorded one led by less than `tolerance` logits is a rounding tie:
    later tokens continue another text and are not compared. The first token is never a tie.
    """
    pairs = enumerate(zip_longest(tokens, canary.token_ids))
    at = next((at for at, (ours, theirs) in pairs if ours != theirs), None)
    if at is None:
        return len(tokens), True
    can_tie = 0 < at < min(len(tokens), len(canary.margins))
    return at, can_tie and canary.margins[at] < tolerance


def why_too_few(num_same: int, canaries: Sequence[Canary]) -> str:
    """Why too few equal tokens show a defect; "" if there are enough.

    Rounding rarely ends a canary early; a defective engine ends most of them at their first near
    tie.
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
    """All tokens of a request; raises queue.Empty at the deadline, or the request's error."""
    tokens: list[int] = []
    while True:
        delivery = deliveries.get(timeout=max(deadline - time.monotonic(), 0))
        if isinstance(delivery, TrtcError):
            raise delivery
        for output in delivery:
            tokens.extend(output.token_ids)
            if output.usage is not None:
                return tuple(tokens)
