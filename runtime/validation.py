"""Every check of a request's fields, in one place: the service and LocalEngine both come here."""

import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from trtc.protos.errors import DeadlineError, InvalidRequestError
from trtc.protos.requests import MAX_LOGPROBS
from trtc.runtime.draft import RequestDraft
from trtc.runtime.request import GenerationRequest, SamplingParams

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 512
MAX_STOP_TOKENS = 256
MAX_PENALTY = 2.0
MAX_BIAS = 100.0
MAX_REQUEST_ID_CHARACTERS = 256
MAX_PRIORITY = 1000


@dataclass(frozen=True)
class RequestBounds:
    """What one engine can do for one request."""

    vocab_size: int
    max_context: int
    """Prompt and completion tokens of a sequence: the engine's max_seq_len, or what its KV pool
    holds if that is less."""
    max_sequences: int
    """Largest n: sequences in one step."""


def default_max_tokens(num_prompt_tokens: int, bounds: RequestBounds) -> int:
    """New tokens of a request that names no limit: as many as fit, at least 1."""
    return max(1, bounds.max_context - num_prompt_tokens)


def finish_draft(
    draft: RequestDraft,
    *,
    request_id: str,
    prompt_ids: Sequence[int],
    deadline: float | None,
    bounds: RequestBounds,
) -> GenerationRequest:
    """A draft whose prompt has become tokens, with its defaults filled in; not yet validated."""
    max_tokens = draft.max_tokens
    return GenerationRequest(
        request_id=request_id,
        prompt_ids=tuple(prompt_ids),
        sampling=draft.sampling,
        max_tokens=default_max_tokens(len(prompt_ids), bounds)
        if max_tokens is None
        else max_tokens,
        stop=draft.stop,
        stop_token_ids=draft.stop_token_ids,
        ignore_eos=draft.ignore_eos,
        include_stop=draft.include_stop,
        n=draft.n,
        logprobs=draft.logprobs,
        priority=draft.priority,
        deadline=deadline,
    )


def validate(request: GenerationRequest, bounds: RequestBounds) -> None:
    """Refuse what the engine can't do or what contradicts itself.

    Raises:
        InvalidRequestError: names the field, what is wrong with it and what would be right.
        DeadlineError: the deadline has passed.
    """
    if not 1 <= len(request.request_id) <= MAX_REQUEST_ID_CHARACTERS:
        raise InvalidRequestError(
            f"has {len(request.request_id)} characters",
            field="request_id",
            remedy=f"Give 1 to {MAX_REQUEST_ID_CHARACTERS}",
        )
    _check_lengths(request, bounds)
    _check_sampling(request.sampling, bounds)
    _check_number_of_sequences(request, bounds)
    _check_stops(request, bounds)
    if request.logprobs is not None:
        limit = min(MAX_LOGPROBS, bounds.vocab_size)
        _check_range("logprobs", request.logprobs, 0, limit)
    _check_range("priority", request.priority, -MAX_PRIORITY, MAX_PRIORITY)
    _check_deadline(request.deadline)


def _check_lengths(request: GenerationRequest, bounds: RequestBounds) -> None:
    length = len(request.prompt_ids)
    if length == 0:
        raise InvalidRequestError(
            "has no tokens", field="prompt", remedy="Give at least one token or character"
        )
    _check_token_ids("prompt_ids", request.prompt_ids, bounds)
    if length >= bounds.max_context:
        raise InvalidRequestError(
            f"has {length} tokens; prompt and completion together may have {bounds.max_context}",
            field="prompt",
            remedy=f"Shorten it to at most {bounds.max_context - 1} tokens",
        )
    _check_range("max_tokens", request.max_tokens, 1, bounds.max_context - length)


def _check_sampling(sampling: SamplingParams, bounds: RequestBounds) -> None:
    _check_range("temperature", sampling.temperature, 0.0, math.inf)
    _check_range("top_k", sampling.top_k, 0, 2**31 - 1)
    _check_range("top_p", sampling.top_p, 0.0, 1.0, above_least=True)
    _check_range("min_p", sampling.min_p, 0.0, 1.0)
    _check_range("repetition_penalty", sampling.repetition_penalty, 0.0, math.inf, above_least=True)
    _check_range("presence_penalty", sampling.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
    _check_range("frequency_penalty", sampling.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
    if sampling.seed is not None:
        _check_range("seed", sampling.seed, 0, 2**64 - 1)
    _check_token_ids("logit_bias", sampling.logit_bias.keys(), bounds)
    for bias in sampling.logit_bias.values():
        _check_range("logit_bias", bias, -MAX_BIAS, MAX_BIAS)


def _check_number_of_sequences(request: GenerationRequest, bounds: RequestBounds) -> None:
    _check_range("n", request.n, 1, bounds.max_sequences)
    if request.n > 1 and request.sampling.temperature == 0:
        raise InvalidRequestError(
            f"{request.n} sequences at temperature 0 would all be the same",
            field="n",
            remedy="Give n = 1, or a temperature above 0",
        )


def _check_stops(request: GenerationRequest, bounds: RequestBounds) -> None:
    _check_range("stop (how many)", len(request.stop), 0, MAX_STOPS)
    for stop in request.stop:
        _check_range("stop (characters)", len(stop), 1, MAX_STOP_CHARACTERS)
    _check_range("stop_token_ids (how many)", len(request.stop_token_ids), 0, MAX_STOP_TOKENS)
    _check_token_ids("stop_token_ids", request.stop_token_ids, bounds)


def _check_deadline(deadline: float | None) -> None:
    if deadline is None:
        return
    if math.isnan(deadline):
        raise InvalidRequestError("is not a number", field="deadline", remedy="Give a time")
    if deadline <= time.monotonic():
        raise DeadlineError(
            "passed before the request was queued", field="deadline", remedy="Allow more time"
        )


def _check_token_ids(field: str, token_ids: Collection[int], bounds: RequestBounds) -> None:
    if not token_ids:
        return
    for token in (min(token_ids), max(token_ids)):
        if not 0 <= token < bounds.vocab_size:
            raise InvalidRequestError(
                f"token id {token} is not in the vocabulary",
                field=field,
                remedy=f"Give ids from 0 to {bounds.vocab_size - 1}",
            )


def _check_range(
    field: str, value: float, least: float, most: float, *, above_least: bool = False
) -> None:
    """`most` of infinity asks for a finite number."""
    above = value > least if above_least else value >= least
    below = value < most if most == math.inf else value <= most
    if above and below:  # false for NaN
        return
    lower = f"above {least}" if above_least else f"at least {least}"
    upper = "finite" if most == math.inf else f"at most {most}"
    raise InvalidRequestError(f"is {value}", field=field, remedy=f"Give {lower} and {upper}")
