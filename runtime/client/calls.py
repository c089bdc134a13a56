"""Calls with one reply: their requests, and the parsing of replies; shared by both clients."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from trtc.protos.errors import UnavailableError
from trtc.protos.trtc.v1 import inference_pb2 as pb
from trtc.runtime.requests.model_info import ModelInfo
from trtc.runtime.text.chat_options import chat_of
from trtc.runtime.text.template_options import Message, TemplateOptions
from trtc.runtime.wire.messages import chat_to_wire, info_from_wire
from trtc.runtime.wire.methods import (
    ABORT,
    DETOKENIZE,
    GET_MODEL_INFO,
    TOKENIZE,
    Method,
    RequestT,
    ResponseT,
)

AnswerT = TypeVar("AnswerT")


@dataclass(frozen=True)
class Call(Generic[RequestT, ResponseT, AnswerT]):
    method: Method[RequestT, ResponseT]
    request: RequestT
    read: Callable[[ResponseT], AnswerT]

    def answer(self, reply: bytes) -> AnswerT:
        """Parse a reply; raises ServeError if that fails."""
        return self.read(self.method.parse(reply))


def closed_client(address: str) -> UnavailableError:
    """The error of a call on a closed client."""
    return UnavailableError("the client is closed", field=address, remedy="Make another")


def tokenize(
    text: str, model: str, add_special_tokens: bool
) -> Call[pb.TokenizeRequest, pb.TokenizeResponse, tuple[int, ...]]:
    request = pb.TokenizeRequest(model=model, text=text, add_special_tokens=add_special_tokens)
    return Call(TOKENIZE, request, _token_ids)


def tokenize_chat(
    messages: Sequence[Message], model: str, options: TemplateOptions
) -> Call[pb.TokenizeRequest, pb.TokenizeResponse, tuple[int, ...]]:
    request = pb.TokenizeRequest(model=model, chat=chat_to_wire(chat_of(messages, options)))
    return Call(TOKENIZE, request, _token_ids)


def detokenize(
    token_ids: Sequence[int], model: str, keep_special_tokens: bool
) -> Call[pb.DetokenizeRequest, pb.DetokenizeResponse, str]:
    request = pb.DetokenizeRequest(
        model=model, token_ids=token_ids, keep_special_tokens=keep_special_tokens
    )
    return Call(DETOKENIZE, request, lambda reply: reply.text)


def info(
    model: str,
) -> Call[pb.GetModelInfoRequest, pb.GetModelInfoResponse, tuple[ModelInfo, ...]]:
    request = pb.GetModelInfoRequest(model=model)
    return Call(
        GET_MODEL_INFO, request, lambda reply: tuple(info_from_wire(one) for one in reply.models)
    )


def abort(request_id: str, model: str) -> Call[pb.AbortRequest, pb.AbortResponse, None]:
    request = pb.AbortRequest(model=model, request_id=request_id)
    return Call(ABORT, request, lambda reply: None)


def _token_ids(reply: pb.TokenizeResponse) -> tuple[int, ...]:
    return tuple(reply.token_ids)
