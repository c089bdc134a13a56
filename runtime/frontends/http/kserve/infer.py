"""The bodies of `/infer`: JSON, which the bytes of binary tensors may follow.

    {"inputs": [{..., "parameters": {"binary_data_size": 12}}]}<12 bytes>

The header Inference-Header-Content-Length is the length of the JSON in bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from numpy.typing import NDArray

from trtc.protos.errors import InvalidRequestError
from trtc.runtime.frontends.http.bodies import decoded
from trtc.runtime.frontends.http.kserve.reading import API, array_of_json
from trtc.runtime.tensors.codec import (
    array_of_bytes,
    bytes_of,
    output_datatype,
    refuse_parameters,
)
from trtc.runtime.tensors.inference import InferRequest
from trtc.runtime.tensors.replies import Message

HEADER_LENGTH = b"inference-header-content-length"
_SIZE = "binary_data_size"
_IS_BINARY = "binary_data"
_ALL_BINARY = "binary_data_output"


class InputFields(msgspec.Struct):
    name: str
    datatype: str
    shape: list[int]
    parameters: dict[str, Any] = {}
    data: msgspec.Raw = msgspec.Raw()


class OutputFields(msgspec.Struct):
    name: str
    parameters: dict[str, Any] = {}


class InferFields(msgspec.Struct):
    inputs: list[InputFields]
    id: str = ""
    parameters: dict[str, Any] = {}
    outputs: list[OutputFields] = []


@dataclass(frozen=True)
class InferBody:
    """A parsed body, with its tensors."""

    request_id: str
    tensors: Mapping[str, NDArray[Any]]
    outputs: list[str]
    """Names of the requested outputs; empty: all."""
    parameters: Mapping[str, Any]
    is_binary: Mapping[str, bool]
    """Requested output -> whether it is returned as bytes; for others see `binary_data_output`."""

    def wants_bytes(self, name: str) -> bool:
        return self.is_binary.get(name, self.parameters.get(_ALL_BINARY) is True)


def read_infer(body: bytes, header_length: bytes) -> InferBody:
    """
    Args:
        header_length: value of the header HEADER_LENGTH; empty: the body is only JSON.

    Raises:
        InvalidRequestError: the body is invalid; names the field.
    """
    length = _length(body, header_length)
    fields, rest = decoded(body[:length], InferFields, API), body[length:]
    tensors: dict[str, NDArray[Any]] = {}
    for at, sent in enumerate(fields.inputs):
        if sent.name in tensors:
            raise InvalidRequestError(
                "is given twice", field=sent.name[:100], remedy="Send it once"
            )
        size = sent.parameters.pop(_SIZE, None)
        refuse_parameters(f"inputs[{at}]", sent.parameters)
        if size is None:
            data = decoded(bytes(sent.data), object, API) if bytes(sent.data) else []
            tensors[sent.name] = array_of_json(sent.name, sent.datatype, sent.shape, data)
            continue
        if type(size) is not int or not 0 <= size <= len(rest):
            raise InvalidRequestError(
                f"is {str(size)[:100]}, and {len(rest)} bytes follow",
                field=f"inputs[{at}].parameters.{_SIZE}",
                remedy="Send the tensors' bytes after the JSON, in the order of inputs",
            )
        tensors[sent.name] = array_of_bytes(sent.name, sent.datatype, sent.shape, rest[:size])
        rest = rest[size:]
    if rest:
        raise InvalidRequestError(
            f"has {len(rest)} bytes after its tensors", field="body", remedy="Leave them out"
        )
    is_binary = {}
    for at, output in enumerate(fields.outputs):
        if _IS_BINARY in output.parameters:
            is_binary[output.name] = output.parameters.pop(_IS_BINARY) is True
        refuse_parameters(f"outputs[{at}]", output.parameters)
    names = [output.name for output in fields.outputs]
    return InferBody(fields.id, tensors, names, fields.parameters, is_binary)


def written_infer(
    request: InferRequest, body: InferBody, message: Message
) -> tuple[bytes, int | None]:
    """The body of an answer, and the length of its JSON if bytes follow, else None."""
    outputs, chunks = list[dict[str, Any]](), list[bytes]()
    for name, array in message.items():
        output: dict[str, Any] = {
            "name": name,
            "datatype": output_datatype(name),
            "shape": list(array.shape),
        }
        if body.wants_bytes(name):
            chunks.append(bytes_of(array))
            output["parameters"] = {_SIZE: len(chunks[-1])}
        else:
            output["data"] = json_values(array)
        outputs.append(output)
    answer: dict[str, Any] = {"model_name": request.model, "model_version": request.version}
    if body.request_id:
        answer["id"] = body.request_id
    document = msgspec.json.encode({**answer, "outputs": outputs})
    return document + b"".join(chunks), len(document) if chunks else None


def json_values(array: NDArray[Any]) -> list[Any]:
    """Values of an array in row-major order, for JSON."""
    values: list[Any] = array.reshape(-1).tolist()
    return [value.decode() if isinstance(value, bytes) else value for value in values]


def _length(body: bytes, header_length: bytes) -> int:
    if not header_length:
        return len(body)
    if not header_length.isdigit() or len(header_length) > 20 or int(header_length) > len(body):
        raise InvalidRequestError(
            f"is {header_length[:40].decode(errors='replace')!r}, the body has {len(body)} bytes",
            field="Inference-Header-Content-Length",
            remedy="Send how many bytes of the body are JSON",
        )
    return int(header_length)
