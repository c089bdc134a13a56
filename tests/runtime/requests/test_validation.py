import time
from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.requests import greedy_request
from trtc.protos.errors import DeadlineError, InvalidRequestError
from trtc.protos.sampling import SamplingDefaults, SamplingParams
from trtc.runtime.requests.request import GenerationRequest
from trtc.runtime.requests.request_input import RequestInput
from trtc.runtime.requests.validation import (
    RequestBounds,
    default_max_tokens,
    finish_input,
    validate,
)

BOUNDS = RequestBounds(vocab_size=100, max_context=32, max_sequences=8)
GOOD = greedy_request("r", [1, 2, 3], 4)
NAN, INFINITY = float("nan"), float("inf")

BAD_FIELDS: list[tuple[str, dict[str, Any]]] = [
    ("request_id", {"request_id": ""}),
    ("request_id", {"request_id": "x" * 257}),
    ("prompt", {"prompt_ids": ()}),
    ("prompt", {"prompt_ids": (1,) * 32}),
    ("prompt_ids", {"prompt_ids": (1, 100)}),
    ("prompt_ids", {"prompt_ids": (-1, 5)}),
    ("max_tokens", {"max_tokens": 0}),
    ("max_tokens", {"max_tokens": 30}),
    ("stop (how many)", {"stop": ("a",) * 17}),
    ("stop (characters)", {"stop": ("a", "")}),
    ("stop (characters)", {"stop": ("a" * 513,)}),
    ("stop_token_ids", {"stop_token_ids": (100,)}),
    ("stop_token_ids (how many)", {"stop_token_ids": (1,) * 257}),
    ("n", {"n": 0}),
    ("n", {"n": 9, "sampling": SamplingParams()}),
    ("n", {"n": 2}),
    ("logprobs", {"logprobs": -1}),
    ("logprobs", {"logprobs": 21}),
    ("priority", {"priority": 11}),
    ("deadline", {"deadline": NAN}),
]

BAD_SAMPLING: list[tuple[str, dict[str, Any]]] = [
    ("temperature", {"temperature": NAN}),
    ("temperature", {"temperature": INFINITY}),
    ("temperature", {"temperature": -1.0}),
    ("temperature", {"temperature": 1e39}),
    ("top_k", {"top_k": -1}),
    ("top_k", {"top_k": 2**31}),
    ("top_p", {"top_p": 0.0}),
    ("top_p", {"top_p": 1.01}),
    ("top_p", {"top_p": NAN}),
    ("min_p", {"min_p": -0.1}),
    ("min_p", {"min_p": 1.1}),
    ("repetition_penalty", {"repetition_penalty": 0.0}),
    ("repetition_penalty", {"repetition_penalty": INFINITY}),
    ("presence_penalty", {"presence_penalty": 2.1}),
    ("presence_penalty", {"presence_penalty": NAN}),
    ("frequency_penalty", {"frequency_penalty": -2.1}),
    ("logit_bias", {"logit_bias": {100: 1.0}}),
    ("logit_bias", {"logit_bias": {1: NAN}}),
    ("logit_bias", {"logit_bias": {1: 101.0}}),
    ("seed", {"seed": -1}),
    ("seed", {"seed": 2**64}),
]


def test_the_good_request_is_good() -> None:
    validate(GOOD, BOUNDS)
    validate(replace(GOOD, max_tokens=29, n=1, logprobs=20, deadline=time.monotonic() + 9), BOUNDS)
    validate(replace(GOOD, n=8, sampling=SamplingParams(seed=2**64 - 1, top_k=2**31 - 1)), BOUNDS)


@pytest.mark.parametrize(("field", "changes"), BAD_FIELDS)
def test_bad_fields_are_named_with_a_remedy(field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        validate(replace(GOOD, **changes), BOUNDS)
    assert caught.value.field == field
    assert caught.value.remedy


@pytest.mark.parametrize(("field", "changes"), BAD_SAMPLING)
def test_bad_sampling_fields_are_named_with_a_remedy(field: str, changes: dict[str, Any]) -> None:
    sampling = replace(SamplingParams(), **changes)
    with pytest.raises(InvalidRequestError) as caught:
        validate(replace(GOOD, sampling=sampling), BOUNDS)
    assert caught.value.field == field
    assert caught.value.remedy


def test_a_past_deadline_is_a_deadline_error() -> None:
    with pytest.raises(DeadlineError):
        validate(replace(GOOD, deadline=time.monotonic() - 1), BOUNDS)


def test_what_a_request_input_does_not_say_is_the_models() -> None:
    defaults = SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95, max_tokens=7)
    bounds = BOUNDS._replace(defaults=defaults)

    def finished(**fields: Any) -> GenerationRequest:
        request_input = RequestInput(token_ids=(1, 2), **fields)
        return finish_input(
            request_input, request_id="r", prompt_ids=[1, 2], deadline=None, bounds=bounds
        )

    absent = finished()
    assert absent.sampling == SamplingParams(temperature=0.6, top_k=20, top_p=0.95)
    assert absent.max_tokens == 7
    # What a request gives is its own, also where it is the runtime's default.
    given = finished(sampling={"temperature": 1.0, "top_k": 0, "min_p": 0.1}, max_tokens=9)
    assert given.sampling == SamplingParams(top_p=0.95, min_p=0.1)
    assert given.max_tokens == 9
    longest = bounds._replace(defaults=SamplingDefaults(max_tokens=1000))
    assert default_max_tokens(2, longest) == 30


def test_an_input_without_a_limit_may_fill_the_context() -> None:
    request_input = RequestInput(token_ids=(1, 2), sampling={"seed": 4}, stop=("x",), n=2)
    request = finish_input(
        request_input, request_id="r", prompt_ids=[1, 2], deadline=5.0, bounds=BOUNDS
    )
    assert request.max_tokens == default_max_tokens(2, BOUNDS) == 30
    assert (request.prompt_ids, request.stop, request.n) == ((1, 2), ("x",), 2)
    validate(replace(request, deadline=None), BOUNDS)
