"""The bodies of `/generate` and `/generate_stream`: one row, a key for each tensor.

    {"text_input": "...", "max_tokens": 20, "stop_words": ["\\n"]} -> {"text_output": "...", ...}

Inputs may also be under `parameters`, where some clients send them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from numpy.typing import NDArray

from trtc.protos.errors import InvalidRequestError
from trtc.runtime.frontends.http.bodies import decoded
from trtc.runtime.frontends.http.kserve.infer import json_values
from trtc.runtime.frontends.http.kserve.reading import API, array_of_json
from trtc.runtime.tensors.codec import input_datatype
from trtc.runtime.tensors.inference import InferRequest
from trtc.runtime.tensors.replies import Message


@dataclass(frozen=True)
class GenerateBody:
    """A parsed body, with its tensors."""

    request_id: str
    tensors: Mapping[str, NDArray[Any]]
    parameters: Mapping[str, Any]


def read_generate(body: bytes) -> GenerateBody:
    """Parse a body; raises InvalidRequestError, which names the field."""
    fields = decoded(body, dict[str, Any], API)
    request_id = fields.pop("id", "")
    if not isinstance(request_id, str):
        raise InvalidRequestError("is no string", field="id", remedy="Send a string")
    below = fields.pop("parameters", {})
    if not isinstance(below, dict):
        raise InvalidRequestError("is no object", field="parameters", remedy="Send an object")
    tensors, parameters = dict[str, NDArray[Any]](), dict[str, Any]()
    for name, value in (*fields.items(), *below.items()):
        kind = input_datatype(name)
        if kind is None:
            parameters[name] = value
        elif name in tensors:
            raise InvalidRequestError("is given twice", field=name, remedy="Send it once")
        else:
            tensors[name] = array_of_json(name, kind, _shape(value), value)
    return GenerateBody(request_id, tensors, parameters)


def written_generate(request: InferRequest, message: Message) -> bytes:
    """The body of an answer: outputs of one value as that value, others as flat lists."""
    answer: dict[str, Any] = {"model_name": request.model, "model_version": request.version}
    if request.request_id:
        answer["id"] = request.request_id
    for name, array in message.items():
        values = json_values(array)
        answer[name] = values[0] if len(values) == 1 else values
    return msgspec.json.encode(answer)


def _shape(value: object) -> list[int]:
    """Shape of the tensor of a JSON value: a batch of one row, and a scalar is one element."""
    shape = [1]
    while isinstance(value, list):
        shape.append(len(value))
        value = value[0] if value else None
    return shape if len(shape) > 1 else [1, 1]
