"""The methods of trtc.v1.Inference as a typed table, from which server and clients are made."""

from dataclasses import dataclass
from typing import Generic, TypeVar

from google.protobuf.message import Message

from trtc.protos.trtc.v1 import inference_pb2 as pb

SERVICE = "trtc.v1.Inference"

RequestT = TypeVar("RequestT", bound=Message)
ResponseT = TypeVar("ResponseT", bound=Message)


@dataclass(frozen=True)
class Method(Generic[RequestT, ResponseT]):
    name: str
    request: type[RequestT]
    response: type[ResponseT]

    @property
    def path(self) -> str:
        return f"/{SERVICE}/{self.name}"


GENERATE = Method("Generate", pb.GenerateRequest, pb.GenerateResponse)
"""The one that streams its responses."""
ABORT = Method("Abort", pb.AbortRequest, pb.AbortResponse)
TOKENIZE = Method("Tokenize", pb.TokenizeRequest, pb.TokenizeResponse)
DETOKENIZE = Method("Detokenize", pb.DetokenizeRequest, pb.DetokenizeResponse)
GET_MODEL_INFO = Method("GetModelInfo", pb.GetModelInfoRequest, pb.GetModelInfoResponse)
