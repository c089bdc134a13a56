"""All checks of a request's fields, for the service and LocalEngine."""

import math
import time
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from trtc.protos.errors import ContextLengthError, DeadlineError, InvalidRequestError
from trtc.protos.requests import MAX_LOGPROBS
from trtc.protos.sampling import (
    NO_DEFAULTS,
    SAMPLING_PARAMETERS,
    Range,
    SamplingDefaults,
    SamplingParams,
)
from trtc.runtime.requests.principal import LOCAL, Principal
from trtc.runtime.requests.request import GenerationRequest
from trtc.runtime.requests.request_input import RequestInput

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 512
MAX_STOP_TOKENS = 256
MAX_BIAS = 100.0
MAX_REQUEST_ID_CHARACTERS = 256
MAX_SALT_BYTES = 256
MAX_PRIORITY = 10


class RequestBounds(NamedTuple):
    """Limits of one engine's requests, and their defaults."""

    vocab_size: int
    max_context: int
    """Prompt and completion tokens of a sequence: the engine's max_seq_len, or what its KV pool
    holds if that is less."""
    max_sequences: int
    """Largest n: sequences in one step."""
    defaults: SamplingDefaults = NO_DEFAULTS


def default_max_tokens(num_prompt_tokens: int, bounds: RequestBounds) -> int:
    """New tokens of a request that names no limit: as many as the model's default and the context
    allow, at least 1."""
    fitting = max(1, bounds.max_context - num_prompt_tokens)
    limit = bounds.defaults.max_tokens
    return fitting if limit is None else min(fitting, limit)


def finish_input(
    request_input: RequestInput,
    *,
    request_id: str,
    prompt_ids: Sequence[int],
    deadline: float | None,
    bounds: RequestBounds,
    principal: Principal = LOCAL,
    share_prefixes: bool = False,
) -> GenerationRequest:
    """The request of an input and its prompt's tokens, with defaults filled in; not yet
    validated."""
    max_tokens = request_input.max_tokens
    return GenerationRequest(
        request_id=request_id,
        prompt_ids=tuple(prompt_ids),
        sampling=_sampling_params(request_input, bounds),
        max_tokens=default_max_tokens(len(prompt_ids), bounds)
        if max_tokens is None
        else max_tokens,
        stop=request_input.stop,
        stop_token_ids=request_input.stop_token_ids,
        ignore_eos=request_input.ignore_eos,
        min_tokens=request_input.min_tokens,
        include_stop=request_input.include_stop,
        n=request_input.n,
        logprobs=request_input.logprobs,
        prompt_logprobs=request_input.prompt_logprobs,
        priority=_priority(request_input.priority, principal.limits.priority),
        deadline=deadline,
        principal=principal,
        cache_salt=request_input.cache_salt,
        share_prefixes=share_prefixes,
    )


def _priority(asked: int, added: int) -> int:
    """Add a tenant's priority, clamped to the range. A request's own priority out of range is
    refused later."""
    return max(-MAX_PRIORITY, min(MAX_PRIORITY, asked + added)) if added else asked


def _sampling_params(request_input: RequestInput, bounds: RequestBounds) -> SamplingParams:
    """The request input's parameters, with the model's defaults, then the runtime's."""
    said: dict[str, Any] = {**bounds.defaults.sampling(), **request_input.sampling}
    return SamplingParams(**said)


def validate(request: GenerationRequest, bounds: RequestBounds) -> None:
    """Check that the engine can serve a request and that its fields do not contradict each other.

    Raises:
        InvalidRequestError: a field is invalid; names it, the problem and the remedy.
        DeadlineError: the deadline has passed.
    """
    if not 1 <= len(request.request_id) <= MAX_REQUEST_ID_CHARACTERS:
        raise InvalidRequestError(
            f"has {len(request.request_id)} characters",
            field="request_id",
            remedy=f"Give 1 to {MAX_REQUEST_ID_CHARACTERS}",
        )
    check_lengths(request, bounds)
    _check_sampling(request.sampling, bounds)
    _check_number_of_sequences(request, bounds)
    _check_stops(request, bounds)
    for name in ("logprobs", "prompt_logprobs"):
        asked = getattr(request, name)
        if asked is not None:
            _check_range(name, asked, 0, min(MAX_LOGPROBS, bounds.vocab_size))
    _check_range("priority", request.priority, -MAX_PRIORITY, MAX_PRIORITY)
    _check_salt(request.cache_salt)
    _check_deadline(request.deadline)


def _check_salt(salt: str) -> None:
    size = len(salt.encode(errors="surrogatepass"))
    if size > MAX_SALT_BYTES:
        raise InvalidRequestError(
            f"has {size} bytes", field="cache_salt", remedy=f"Give at most {MAX_SALT_BYTES}"
        )


def check_prompt_length(length: int, bounds: RequestBounds) -> None:
    """Refuse a prompt that leaves no room for a new token; InvalidRequestError."""
    if length >= bounds.max_context:
        raise ContextLengthError(
            f"has {length} tokens; this model's maximum context length is {bounds.max_context} "
            "tokens, prompt and completion together",
            field="prompt",
            remedy=f"Shorten it to at most {bounds.max_context - 1} tokens",
        )


def check_number_of_stop_tokens(number: int) -> None:
    """Refuse more than MAX_STOP_TOKENS; InvalidRequestError."""
    _check_range("stop_token_ids (how many)", number, 0, MAX_STOP_TOKENS)


def check_stop_strings(stops: Collection[str]) -> None:
    """Refuse more than MAX_STOPS, and those that are empty or too long; InvalidRequestError."""
    _check_range("stop (how many)", len(stops), 0, MAX_STOPS)
    for stop in stops:
        _check_range("stop (characters)", len(stop), 1, MAX_STOP_CHARACTERS)


def check_lengths(request: GenerationRequest, bounds: RequestBounds) -> None:
    """Refuse prompt and completion that together exceed the context; InvalidRequestError."""
    length = len(request.prompt_ids)
    if length == 0:
        raise InvalidRequestError(
            "has no tokens", field="prompt", remedy="Give at least one token or character"
        )
    _check_token_ids("prompt_ids", request.prompt_ids, bounds)
    check_prompt_length(length, bounds)
    _check_max_tokens(request.max_tokens, length, bounds)
    _check_range("min_tokens", request.min_tokens, 0, request.max_tokens)


def _check_max_tokens(max_tokens: int, num_prompt_tokens: int, bounds: RequestBounds) -> None:
    fitting = bounds.max_context - num_prompt_tokens
    if max_tokens > fitting:
        raise ContextLengthError(
            f"is {max_tokens}; this model's maximum context length is {bounds.max_context} tokens, "
            f"of which the prompt has {num_prompt_tokens}",
            field="max_tokens",
            remedy=f"Give at least 1 and at most {fitting}",
        )
    _check_range("max_tokens", max_tokens, 1, fitting)


def _check_sampling(sampling: SamplingParams, bounds: RequestBounds) -> None:
    for one in SAMPLING_PARAMETERS:
        _check_in(one.name, getattr(sampling, one.name), one.values)
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
    check_stop_strings(request.stop)
    check_number_of_stop_tokens(len(request.stop_token_ids))
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


def _check_range(field: str, value: float, least: float, most: float) -> None:
    _check_in(field, value, Range(least, most))


def _check_in(field: str, value: float, values: Range) -> None:
    if value not in values:
        raise InvalidRequestError(f"is {value}", field=field, remedy=f"Give {values}")
