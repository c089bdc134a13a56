"""The fields of requests that are read, and those that are refused by name."""

from typing import ClassVar

import msgspec

from trtc.runtime.frontends.http.bodies import Fields, Refused
from trtc.runtime.frontends.http.sampling import SamplingFields

_API = "Text Generation Inference"


class GuideGrammar(msgspec.Struct, kw_only=True):
    """`grammar` of the answer."""

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
    """Turns on sampling without other parameters."""
    grammar: GuideGrammar | None = None
    max_new_tokens: int | None = None
    return_full_text: bool | None = None
    """Whether the prompt is returned before the generated text."""
    stop: list[str] | None = None
    top_n_tokens: int | None = None


class GenerateFields(Fields, kw_only=True):
    """Fields of a body. None: not given."""

    api: ClassVar[str] = _API

    inputs: str | None = None
    parameters: msgspec.Raw = msgspec.Raw(b"null")
    stream: bool | None = None
    """Used by the path that answers streamed or not."""
    model: str | None = None
    """Engine name, if there are several; not in TGI, which serves one."""
