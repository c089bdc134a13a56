"""Requests as tests word them."""

from collections.abc import Sequence
from typing import Any

from trtc.protos.sampling import SamplingParams
from trtc.runtime.requests.request import GenerationRequest


def greedy_request(
    request_id: str, prompt_ids: Sequence[int], max_tokens: int, **fields: Any
) -> GenerationRequest:
    """A request for the most likely tokens."""
    return GenerationRequest(
        request_id=request_id,
        prompt_ids=tuple(prompt_ids),
        sampling=SamplingParams(temperature=0.0, seed=0),
        max_tokens=max_tokens,
        **fields,
    )


def sampled_request(
    request_id: str, prompt_ids: Sequence[int], max_tokens: int, *, seed: int = 0, **fields: Any
) -> GenerationRequest:
    """A request for drawn tokens."""
    return GenerationRequest(
        request_id=request_id,
        prompt_ids=tuple(prompt_ids),
        sampling=SamplingParams(temperature=1.0, seed=seed),
        max_tokens=max_tokens,
        **fields,
    )
