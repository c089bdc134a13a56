"""gRPC methods with their types, for servers and clients; those of trtc.v1.Inference."""

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
        """A stub of the method: `connect` is `channel.unary_unary` or `channel.unary_stream`.

        Replies are bytes, for `parse`, because gRPC's blocking calls hide errors of deserializers,
        and its asyncio calls do not.
        """
        return connect(self.path, request_serializer=self.request.SerializeToString)

    def parse(self, reply: bytes) -> ResponseT:
        """Parse a reply; raises ServeError if it is not the method's message."""
        try:
            return self.response.FromString(reply)
        except DecodeError as error:
            raise ServeError(
                f"the server's reply to {self.name} cannot be parsed",
                remedy="Check that the address is that of `trtc serve`, as new as this client",
            ) from error


GENERATE = Method("Generate", pb.GenerateRequest, pb.GenerateResponse)
"""Streams its responses."""
ABORT = Method("Abort", pb.AbortRequest, pb.AbortResponse)
TOKENIZE = Method("Tokenize", pb.TokenizeRequest, pb.TokenizeResponse)
DETOKENIZE = Method("Detokenize", pb.DetokenizeRequest, pb.DetokenizeResponse)
GET_MODEL_INFO = Method("GetModelInfo", pb.GetModelInfoRequest, pb.GetModelInfoResponse)
