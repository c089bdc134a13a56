"""Methods with their types, from which servers and clients are made; those of trtc.v1.Inference."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from google.protobuf.message import DecodeError, Message

from trtc.protos.errors import ServeError
from trtc.protos.trtc.v1 import inference_pb2 as pb

SERVICE = "trtc.v1.Inference"

RequestT = TypeVar("RequestT", bound=Message)
ResponseT = TypeVar("ResponseT", bound=Message)
StubT = TypeVar("StubT")


@dataclass(frozen=True)
class Method(Generic[RequestT, ResponseT]):
    name: str
    request: type[RequestT]
    response: type[ResponseT]
    service: str = SERVICE

    @property
    def path(self) -> str:
        return f"/{self.service}/{self.name}"

    def over(self, connect: Callable[..., StubT]) -> StubT:
        """The method as a call of a channel: `channel.unary_unary` or `channel.unary_stream`.

        Its replies are bytes, for `parse`: of a deserializer that fails, gRPC's blocking calls hide
        the error and its asyncio calls let it through.
        """
        return connect(self.path, request_serializer=self.request.SerializeToString)

    def parse(self, reply: bytes) -> ResponseT:
        """Raises ServeError for a reply that is not the method's message."""
        try:
            return self.response.FromString(reply)
        except DecodeError as error:
            raise ServeError(
                f"the server's reply to {self.name} cannot be parsed",
                remedy="Check that the address is that of `trtc serve`, as new as this client",
            ) from error


GENERATE = Method("Generate", pb.GenerateRequest, pb.GenerateResponse)
"""The one that streams its responses."""
ABORT = Method("Abort", pb.AbortRequest, pb.AbortResponse)
TOKENIZE = Method("Tokenize", pb.TokenizeRequest, pb.TokenizeResponse)
DETOKENIZE = Method("Detokenize", pb.DetokenizeRequest, pb.DetokenizeResponse)
GET_MODEL_INFO = Method("GetModelInfo", pb.GetModelInfoRequest, pb.GetModelInfoResponse)
