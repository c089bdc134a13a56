"""Converts ModelInferRequest to tensors, and replies to ModelInferResponse."""

from typing import Any

from numpy.typing import NDArray

from trtc.protos.errors import InvalidRequestError
from trtc.protos.kserve import grpc_service_pb2 as pb
from trtc.runtime.tensors.codec import (
    array_of_bytes,
    array_of_values,
    bytes_of,
    check_input,
    output_datatype,
    refuse_parameters,
)
from trtc.runtime.tensors.inference import InferRequest, Reply

_CONTENTS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
"""Datatype -> field of InferTensorContents; FP16 has none, and is sent raw."""


def tensors_of(request: pb.ModelInferRequest) -> dict[str, NDArray[Any]]:
    """The request's inputs by name.

    Raises:
        InvalidRequestError: one is unknown, given twice, or not of its type, shape and size.
    """
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise InvalidRequestError(
            f"has {len(raw)} entries for {len(request.inputs)} inputs",
            field="raw_input_contents",
            remedy="Send one for each input, or the contents of all in the inputs themselves",
        )
    tensors: dict[str, NDArray[Any]] = {}
    for at, sent in enumerate(request.inputs):
        if sent.name in tensors:
            raise InvalidRequestError("is given twice", field=sent.name, remedy="Send it once")
        refuse_parameters(f"inputs[{at}]", sent.parameters)
        if not raw:
            tensors[sent.name] = _array_of_contents(sent)
            continue
        if sent.HasField("contents"):
            raise InvalidRequestError(
                "has contents beside raw_input_contents",
                field=sent.name[:100],
                remedy="Send them in one way",
            )
        tensors[sent.name] = array_of_bytes(sent.name, sent.datatype, sent.shape, raw[at])
    return tensors


def outputs_of(request: pb.ModelInferRequest) -> list[str]:
    """Names of the requested outputs."""
    for at, output in enumerate(request.outputs):
        refuse_parameters(f"outputs[{at}]", output.parameters)
    return [output.name for output in request.outputs]


def parameters_of(request: pb.ModelInferRequest) -> dict[str, bool | int | str | float]:
    return {
        name: getattr(value, value.WhichOneof("parameter_choice") or "string_param")
        for name, value in request.parameters.items()
    }


def repository_parameters(
    request: pb.RepositoryModelLoadRequest | pb.RepositoryModelUnloadRequest,
) -> dict[str, bool | int | str | bytes]:
    return {
        name: getattr(value, value.WhichOneof("parameter_choice") or "string_param")
        for name, value in request.parameters.items()
    }


def response_of(request: InferRequest, reply: Reply) -> pb.ModelInferResponse:
    response = pb.ModelInferResponse(
        model_name=request.model, model_version=request.version, id=request.request_id
    )
    for name, array in reply.message.items():
        response.outputs.add(name=name, datatype=output_datatype(name), shape=array.shape)
        response.raw_output_contents.append(bytes_of(array))
    return response


def stream_response_of(request: InferRequest, reply: Reply) -> pb.ModelStreamInferResponse:
    response = response_of(request, reply)
    response.parameters["triton_final_response"].bool_param = reply.final
    return pb.ModelStreamInferResponse(infer_response=response)


def stream_error(request_id: str, error: Exception) -> pb.ModelStreamInferResponse:
    """An error of one request of a stream, which the id identifies."""
    response = pb.ModelInferResponse(id=request_id)
    response.parameters["triton_final_response"].bool_param = True
    return pb.ModelStreamInferResponse(error_message=str(error), infer_response=response)


def _array_of_contents(sent: pb.ModelInferRequest.InferInputTensor) -> NDArray[Any]:
    """A tensor whose values are in the input itself."""
    check_input(sent.name, sent.datatype, sent.shape)
    filled = {field.name for field, _ in sent.contents.ListFields()}
    wanted = _CONTENTS.get(sent.datatype, "raw_input_contents")
    if filled - {wanted}:
        raise InvalidRequestError(
            f"is {sent.datatype[:100]!r} and has {', '.join(sorted(filled - {wanted}))}",
            field=sent.name[:100],
            remedy=f"Send its values in {wanted}",
        )
    values = getattr(sent.contents, wanted, ())
    return array_of_values(sent.name, sent.datatype, sent.shape, values)
