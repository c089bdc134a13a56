"""The fields of requests that are read, and those that are refused by name."""

from typing import Any, ClassVar

import msgspec

from trtc.runtime.frontends.http.bodies import Fields, Refused
from trtc.runtime.frontends.http.sampling import SamplingFields

_API = "the Ollama API"
_REFUSED: Refused = {
    "images": ([],),
}


class Options(SamplingFields, kw_only=True):
    """`options` of a request. None: not given."""

    api: ClassVar[str] = _API
    refused: ClassVar[Refused] = {
        "mirostat": (0,),
        "penalize_newline": (True,),
        "repeat_last_n": (-1,),
        "tfs_z": (1, 1.0),
        "typical_p": (1, 1.0),
    }

    num_predict: int | None = None
    """Negative: as many as fit."""
    repetition_penalty: float | None = msgspec.field(default=None, name="repeat_penalty")
    stop: str | list[str] | None = None


class AskFields(Fields, kw_only=True):
    """Fields of both endpoints that generate. None: not given."""

    api: ClassVar[str] = _API
    refused: ClassVar[Refused] = _REFUSED

    model: str | None = None
    format: msgspec.Raw = msgspec.Raw(b"null")
    """"json", a JSON schema, or {"named": NAME}."""
    keep_alive: float | str | None = None
    """Accepted without effect: engines stay loaded."""
    logprobs: bool | None = None
    options: msgspec.Raw = msgspec.Raw(b"null")
    stream: bool | None = None
    """None: it is streamed."""
    think: bool | str | None = None
    top_logprobs: int | None = None


class ChatFields(AskFields, kw_only=True):
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None


class GenerateFields(AskFields, kw_only=True):
    refused: ClassVar[Refused] = {
        **_REFUSED,
        "context": ([],),
        "height": (0,),
        "steps": (0,),
        "suffix": ("",),
        "template": ("",),
        "width": (0,),
    }

    prompt: str | None = None
    raw: bool | None = None
    """Whether the prompt is used as it is, without the chat template."""
    system: str | None = None


class ShowFields(Fields, kw_only=True):
    api: ClassVar[str] = _API

    model: str | None = None
    name: str | None = None
    """Name of `model` in older clients."""
    verbose: bool | None = None
