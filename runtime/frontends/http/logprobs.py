"""Log-probabilities in the shape that several chat dialects share."""

from collections.abc import Sequence

import msgspec

from trtc.protos.errors import InvalidRequestError
from trtc.runtime.requests.request import TokenLogprobs

LEAST = -9999.0
"""JSON has no infinity: the log-probability reported for a token that cannot be sampled."""


class TokenLogprobEntry(msgspec.Struct):
    """A token, or one of the most likely tokens at its position."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenLogprob(TokenLogprobEntry):
    top_logprobs: list[TokenLogprobEntry]


def asked_logprobs(logprobs: bool | None, top_logprobs: int | None) -> int | None:
    """Number of most likely tokens to report at each position; None: no log-probabilities.

    Raises:
        InvalidRequestError: `top_logprobs` is given without `logprobs`.
    """
    if logprobs:
        return top_logprobs or 0
    if top_logprobs:
        raise InvalidRequestError(
            "is given without logprobs", field="top_logprobs", remedy='Give "logprobs": true'
        )
    return None


def logprob_entries(
    entries: Sequence[TokenLogprobs], *, by_id: bool = False
) -> list[ChosenLogprob]:
    """Args: by_id: whether tokens are named `token_id:N`, which names every token exactly."""
    return [
        ChosenLogprob(
            token=token_name(one.token_id, one.text, by_id),
            logprob=finite(one.logprob),
            bytes=list(one.utf8),
            top_logprobs=[
                TokenLogprobEntry(
                    token_name(token, utf8.decode(errors="replace"), by_id),
                    finite(value),
                    list(utf8),
                )
                for (token, value), utf8 in zip(one.top, one.top_utf8, strict=True)
            ],
        )
        for one in entries
    ]


def token_name(token_id: int, text: str, by_id: bool) -> str:
    return f"token_id:{token_id}" if by_id else text


def finite(value: float) -> float:
    return max(value, LEAST)
