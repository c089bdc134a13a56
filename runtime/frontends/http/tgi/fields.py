"""The fields of requests: those that are read, and those that are refused by name."""

from typing import ClassVar

import msgspec

from trtc.runtime.frontends.http.bodies import Fields, Refused
from trtc.runtime.frontends.http.sampling import SamplingFields

_API = "Text Generation Inference"


class GuideGrammar(msgspec.Struct, kw_only=True):
    """What an answer has to be."""

    type: str
    value: msgspec.Raw


class Parameters(SamplingFields, kw_only=True):
    """`parameters` of a request. None: not given."""

    api: ClassVar[str] = _API
    refused: ClassVar[Refused] = {
        "adapter_id": (),
        "best_of": (1,),
        "decoder_input_details": (False,),
        "truncate": (),
        "typical_p": (1, 1.0),
        "watermark": (False,),
    }

    details: bool | None = None
    do_sample: bool | None = None
    """Draw, though nothing else says so."""
    grammar: GuideGrammar | None = None
    max_new_tokens: int | None = None
    return_full_text: bool | None = None
    """Return the prompt before the generated text."""
    stop: list[str] | None = None
    top_n_tokens: int | None = None


class GenerateFields(Fields, kw_only=True):
    """A body. None: not given."""

    api: ClassVar[str] = _API

    inputs: str | None = None
    parameters: msgspec.Raw = msgspec.Raw(b"null")
    stream: bool | None = None
    """Read where a path answers both ways."""
    model: str | None = None
    """Which engine, of several; TGI serves one."""
