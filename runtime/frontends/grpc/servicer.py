"""trtc.v1.Inference over gRPC, as a thin layer over the service."""

from contextlib import AsyncExitStack

from trtc.protos.errors import InvalidRequestError
from trtc.protos.trtc.v1 import inference_pb2 as pb
from trtc.runtime.frontends.grpc.calls import (
    STALLED_CLIENT_S,
    Context,
    GrpcService,
    deadline,
    streaming,
    unary,
    writing,
)
from trtc.runtime.frontends.grpc.intake import Intake
from trtc.runtime.requests.request_input import RequestInput
from trtc.runtime.requests.validation import check_number_of_stop_tokens, check_prompt_length
from trtc.runtime.service.service import Service
from trtc.runtime.service.streams import OutputStream
from trtc.runtime.wire.bounded import MAX_NUMBERS, parse
from trtc.runtime.wire.messages import (
    chat_from_wire,
    info_to_wire,
    input_from_wire,
    output_to_wire,
)
from trtc.runtime.wire.methods import (
    ABORT,
    DETOKENIZE,
    GENERATE,
    GET_MODEL_INFO,
    TOKENIZE,
)


class InferenceServicer:
    """The handlers of trtc.v1.Inference."""

    def __init__(
        self, service: Service, intake: Intake, *, stalled_client_s: float = STALLED_CLIENT_S
    ) -> None:
        self._service = service
        self._intake = intake
        self._stalled_client_s = stalled_client_s

    def grpc_service(self) -> GrpcService:
        """The service, for a port."""
        return GrpcService(
            pb.DESCRIPTOR,
            {
                GENERATE.name: streaming(GENERATE, self._generate),
                ABORT.name: unary(self._intake, ABORT, self.abort),
                TOKENIZE.name: unary(self._intake, TOKENIZE, self.tokenize),
                DETOKENIZE.name: unary(self._intake, DETOKENIZE, self.detokenize),
                GET_MODEL_INFO.name: unary(self._intake, GET_MODEL_INFO, self.get_model_info),
            },
        )

    async def _generate(self, context: Context) -> None:
        """Write outputs as they arrive; leaving the service's context frees the pages."""
        principal = self._intake.caller(context)
        async with AsyncExitStack() as running:
            async with self._intake.request(context, principal, self._input) as request_input:
                generation = self._service.generate(
                    request_input, principal=principal, deadline=deadline(context)
                )
                del request_input
                stream = await running.enter_async_context(generation)
            await self._write(stream, context)

    def _input(self, data: bytes) -> RequestInput:
        """Parse a request; lengths are checked before a Python object is made for every number."""
        engines = self._service.engines.values()
        longest = max((engine.loop.bounds.max_context for engine in engines), default=0)
        request = parse(GENERATE.request, data, max_numbers=MAX_NUMBERS + longest)
        if request.WhichOneof("prompt") == "token_ids":
            bounds = self._service.engine(request.model).loop.bounds
            check_prompt_length(len(request.token_ids.ids), bounds)
        check_number_of_stop_tokens(len(request.stop_token_ids))
        return input_from_wire(request)

    async def _write(self, stream: OutputStream, context: Context) -> None:
        async for outputs in stream:
            with writing((stream,), self._stalled_client_s):
                for output in outputs:
                    await context.write(output_to_wire(output))

    async def abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        self._service.abort(request.model, request.request_id, self._intake.caller(context))
        return pb.AbortResponse()

    async def tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        kind = request.WhichOneof("input")
        if kind is None:
            raise InvalidRequestError("is missing", field="input", remedy="Give text or chat")
        if kind == "chat":
            token_ids = await self._service.tokenize_chat(
                request.model, chat_from_wire(request.chat), self._intake.caller(context)
            )
        else:
            special = not request.HasField("add_special_tokens") or request.add_special_tokens
            token_ids = await self._service.tokenize_text(
                request.model, request.text, special, self._intake.caller(context)
            )
        return pb.TokenizeResponse(token_ids=token_ids)

    async def detokenize(
        self, request: pb.DetokenizeRequest, context: Context
    ) -> pb.DetokenizeResponse:
        text = await self._service.detokenize(
            request.model,
            request.token_ids,
            request.keep_special_tokens,
            self._intake.caller(context),
        )
        return pb.DetokenizeResponse(text=text)

    async def get_model_info(
        self, request: pb.GetModelInfoRequest, context: Context
    ) -> pb.GetModelInfoResponse:
        infos = self._service.info(request.model, self._intake.caller(context))
        return pb.GetModelInfoResponse(models=[info_to_wire(info) for info in infos])
