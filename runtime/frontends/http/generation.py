"""Fields of dialects that accept vLLM's additions, by vLLM's names."""

from typing import Any

from trtc.runtime.frontends.http.sampling import sampling_of
from trtc.runtime.frontends.http.structured import StructuredFields

_AS_THEY_ARE = ("ignore_eos", "min_tokens", "cache_salt")


class GenerationFields(StructuredFields, kw_only=True):
    """Fields of generation. None: not given."""

    model: str | None = None
    logit_bias: dict[int, float] | None = None
    stream: bool | None = None
    # vLLM's own
    cache_salt: str | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    priority: int | None = None
    stop_token_ids: list[int] | None = None


def generation(fields: GenerationFields) -> dict[str, Any]:
    """The keyword arguments of RequestInput that the fields give."""
    values = {name: getattr(fields, name) for name in _AS_THEY_ARE}
    return {
        **{name: value for name, value in values.items() if value is not None},
        "model": fields.model or "",
        "sampling": sampling_of(fields),
        "stop_token_ids": tuple(fields.stop_token_ids or ()),
        # vLLM serves lower numbers first, the service higher ones.
        "priority": -(fields.priority or 0),
    }
