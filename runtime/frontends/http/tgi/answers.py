"""The shapes of answers, whole and as events."""

import msgspec
from msgspec import UNSET, UnsetType


class Token(msgspec.Struct):
    id: int
    text: str
    logprob: float
    special: bool


class Details(msgspec.Struct, kw_only=True):
    """Details of a whole answer."""

    finish_reason: str
    generated_tokens: int
    seed: int | None
    prefill: list[Token] = []
    tokens: list[Token]
    top_tokens: list[list[Token]] | UnsetType = UNSET


class Whole(msgspec.Struct, kw_only=True):
    generated_text: str
    details: Details | None = None


class StreamDetails(msgspec.Struct, kw_only=True):
    finish_reason: str
    generated_tokens: int
    seed: int | None
    input_length: int


class Event(msgspec.Struct, kw_only=True):
    """A token of a stream; the last one has the complete text and details."""

    index: int
    """Counts from 1."""
    token: Token
    top_tokens: list[Token] | UnsetType = UNSET
    generated_text: str | None = None
    details: StreamDetails | None = None


class Info(msgspec.Struct, kw_only=True):
    """Description of the model."""

    model_id: str
    model_sha: str
    """The engine's digest."""
    model_dtype: str
    model_device_type: str
    model_pipeline_tag: str = "text-generation"
    max_concurrent_requests: int
    max_best_of: int = 1
    max_stop_sequences: int
    max_input_tokens: int
    max_total_tokens: int
    max_client_batch_size: int = 1
    router: str = "trtc"
    version: str
