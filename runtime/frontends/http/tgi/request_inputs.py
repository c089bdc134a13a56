"""Converts the fields of Text Generation Inference to request inputs."""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from trtc.protos.errors import InvalidRequestError
from trtc.protos.sampling import SamplingOptions
from trtc.runtime.frontends.http.bodies import Given, read
from trtc.runtime.frontends.http.sampling import sampling_of
from trtc.runtime.frontends.http.tgi.fields import GenerateFields, GuideGrammar, Parameters
from trtc.runtime.requests.grammar import Grammar, schema_or_name
from trtc.runtime.requests.request_input import RequestInput

PARAMS: Mapping[str, str] = {
    **{name: f"parameters.{name}" for name in Parameters.__struct_fields__},
    "max_tokens": "parameters.max_new_tokens",
    "logprobs": "parameters.top_n_tokens",
    "prompt": "inputs",
    "prompt.text": "inputs",
    "prompt_ids": "inputs",
    "text": "inputs",
}
"""Field of a request input -> its name in the request (`requests.naming`)."""

_IDLE: Mapping[str, tuple[float | None, ...]] = {
    "temperature": (None, 1.0),
    "top_k": (None, 0, -1),
    "top_p": (None, 1.0),
}
"""Values with which a parameter does not turn on sampling."""


_GRAMMARS = ("json", "json_schema", "regex")


@dataclass(frozen=True)
class ParsedRequest:
    """A parsed body."""

    given: Given[GenerateFields]
    """Its fields; `ignored` includes those of `parameters`."""
    parameters: Parameters
    inputs: str


def read_generate(body: bytes) -> ParsedRequest:
    """Parse a body.

    Raises:
        InvalidRequestError: names the field that is wrong.
    """
    given = read(body, GenerateFields)
    fields = given.fields
    if fields.inputs is None:
        raise InvalidRequestError("is missing", field="inputs", remedy="Give a text")
    raw = bytes(fields.parameters)
    if raw == b"null":
        return ParsedRequest(given, Parameters(), fields.inputs)
    parameters = read(raw, Parameters, within="parameters.")
    ignored = (*given.ignored, *parameters.ignored)
    return ParsedRequest(Given(fields, ignored), parameters.fields, fields.inputs)


def request_input(parsed: ParsedRequest, request_id: str, *, stream: bool) -> RequestInput:
    """The request input of a request; the tokens of a stream always come with their
    log-probabilities."""
    parameters = parsed.parameters
    returns_tokens = stream or bool(parameters.details)
    return RequestInput(
        text=parsed.inputs,
        model=parsed.given.fields.model or "",
        request_id=request_id,
        sampling=_sampling(parameters),
        max_tokens=parameters.max_new_tokens,
        stop=tuple(parameters.stop or ()),
        grammar=_grammar(parameters.grammar),
        logprobs=(parameters.top_n_tokens or 0) if returns_tokens else None,
    )


def is_sampled(parameters: Parameters) -> bool:
    """Whether tokens are sampled: TGI is greedy unless a sampling parameter is given."""
    return bool(parameters.do_sample) or any(
        getattr(parameters, name) not in idle for name, idle in _IDLE.items()
    )


def _grammar(given: GuideGrammar | None) -> Grammar | None:
    """The grammar of the answer.

    Raises:
        InvalidRequestError: its type is unknown, or its value has another type.
    """
    if given is None:
        return None
    if given.type not in _GRAMMARS:
        raise InvalidRequestError(
            f"is {given.type[:40]!r}",
            field="parameters.grammar.type",
            remedy=f"Give {', '.join(_GRAMMARS)}",
        )
    field = "parameters.grammar.value"
    value = msgspec.json.decode(given.value)
    if given.type == "json_schema" and isinstance(value, dict):
        value = value.get("schema")
    elif given.type == "json" and isinstance(value, str):
        value = msgspec.Raw(value.encode())
    if given.type == "regex":
        if not isinstance(value, str):
            raise InvalidRequestError("is no text", field=field, remedy="Give an expression")
        return Grammar("regex", value, field)
    return schema_or_name(msgspec.json.encode(value).decode(), field)


def _sampling(parameters: Parameters) -> SamplingOptions:
    sampling = sampling_of(parameters)
    if not is_sampled(parameters):
        sampling["temperature"] = 0.0
    return sampling
