"""inference.GRPCInferenceService over gRPC, as a thin layer over the service."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, contextmanager
from typing import Any, NamedTuple

from google.protobuf.message import Message

from trtc.protos.errors import CancelledError, TrtcError
from trtc.protos.kserve import grpc_service_pb2 as pb
from trtc.runtime.engine.handle import EngineHandle
from trtc.runtime.frontends.grpc.calls import (
    STALLED_CLIENT_S,
    Context,
    GrpcService,
    deadline,
    one_answer,
    probe,
    streaming,
    unary,
    writing,
)
from trtc.runtime.frontends.grpc.intake import Intake
from trtc.runtime.frontends.grpc.kserve import methods
from trtc.runtime.frontends.grpc.kserve.messages import (
    outputs_of,
    parameters_of,
    repository_parameters,
    response_of,
    stream_error,
    stream_response_of,
    tensors_of,
)
from trtc.runtime.requests.principal import Scope
from trtc.runtime.service.service import Service
from trtc.runtime.service.streams import OutputStream
from trtc.runtime.tensors import model
from trtc.runtime.tensors.inference import Exchange, Inference, InferRequest, Reply
from trtc.runtime.wire.bounded import MAX_NUMBERS, parse
from trtc.runtime.wire.methods import Method


class _Refused(NamedTuple):
    """A refused request of a stream: it is answered with an error, and the stream goes on."""

    request_id: str
    error: TrtcError


class _Writer:
    """Writes the answers of several requests on one call, one message at a time."""

    def __init__(self, context: Context, stalled_client_s: float) -> None:
        self._context = context
        self._stalled_client_s = stalled_client_s
        self._turn = asyncio.Lock()
        self._answering: list[OutputStream] = []

    def is_busy(self) -> bool:
        """Whether a request is being answered."""
        return bool(self._answering)

    @contextmanager
    def answering(self, streams: Sequence[OutputStream]) -> Iterator[None]:
        """Context manager: within it, these streams fail too if the client does not read."""
        self._answering += streams
        try:
            yield
        finally:
            self._answering = [one for one in self._answering if one not in streams]

    async def write(self, messages: Sequence[pb.ModelStreamInferResponse]) -> None:
        async with self._turn:
            with writing(tuple(self._answering), self._stalled_client_s):
                for message in messages:
                    await self._context.write(message)


class KServeServicer:
    """The handlers of inference.GRPCInferenceService."""

    def __init__(
        self, service: Service, intake: Intake, *, stalled_client_s: float = STALLED_CLIENT_S
    ) -> None:
        self._service = service
        self._intake = intake
        self._inference = Inference(service)
        self._stalled_client_s = stalled_client_s

    def grpc_service(self) -> GrpcService:
        """The service, for a port."""
        probes: dict[Method[Any, Any], Callable[[Any, Context], Awaitable[Message]]] = {
            methods.SERVER_LIVE: self._server_live,
            methods.SERVER_READY: self._server_ready,
        }
        answers: dict[Method[Any, Any], Callable[[Any, Context], Awaitable[Message]]] = {
            methods.SERVER_METADATA: self._server_metadata,
            methods.MODEL_READY: self._model_ready,
            methods.MODEL_METADATA: self._model_metadata,
            methods.MODEL_CONFIG: self._model_config,
            methods.MODEL_STATISTICS: self._model_statistics,
            methods.REPOSITORY_INDEX: self._repository_index,
        }
        orders: dict[Method[Any, Any], Callable[[Any, Context], Awaitable[Message]]] = {
            methods.REPOSITORY_LOAD: self._repository_load,
            methods.REPOSITORY_UNLOAD: self._repository_unload,
        }
        infer, stream_infer = methods.MODEL_INFER, methods.MODEL_STREAM_INFER
        return GrpcService(
            pb.DESCRIPTOR,
            {
                **{one.name: probe(self._intake, one, answer) for one, answer in probes.items()},
                **{one.name: unary(self._intake, one, answer) for one, answer in answers.items()},
                **{
                    one.name: unary(self._intake, one, answer, Scope.ADMIN)
                    for one, answer in orders.items()
                },
                infer.name: one_answer(infer, self._model_infer),
                stream_infer.name: streaming(stream_infer, self._model_stream_infer),
            },
            probes=frozenset(one.name for one in probes),
        )

    async def _server_live(self, request: object, context: Context) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    async def _server_ready(self, request: object, context: Context) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=not self._service.why_not_ready())

    async def _server_metadata(
        self, request: object, context: Context
    ) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(**model.server_metadata())

    async def _model_ready(
        self, request: pb.ModelReadyRequest, context: Context
    ) -> pb.ModelReadyResponse:
        ready = model.is_ready(
            self._service, self._intake.caller(context), request.name, request.version
        )
        return pb.ModelReadyResponse(ready=ready)

    async def _model_metadata(
        self, request: pb.ModelMetadataRequest, context: Context
    ) -> pb.ModelMetadataResponse:
        handle = self._engine(request, context)
        return pb.ModelMetadataResponse(**model.metadata(handle))

    async def _model_config(
        self, request: pb.ModelConfigRequest, context: Context
    ) -> pb.ModelConfigResponse:
        handle = self._engine(request, context)
        return pb.ModelConfigResponse(config=pb.ModelConfig(**model.config(handle)))

    async def _model_statistics(
        self, request: pb.ModelStatisticsRequest, context: Context
    ) -> pb.ModelStatisticsResponse:
        principal = self._intake.caller(context, Scope.METRICS)
        handles = (
            [self._engine(request, context)]
            if request.name
            else model.engines_of(self._service, principal)
        )
        return pb.ModelStatisticsResponse(
            model_stats=[
                pb.ModelStatistics(**model.statistics(self._service, one)) for one in handles
            ]
        )

    async def _repository_index(
        self, request: pb.RepositoryIndexRequest, context: Context
    ) -> pb.RepositoryIndexResponse:
        entries = await model.index(
            self._service,
            self._intake.caller(context),
            repository=request.repository_name,
            ready=request.ready,
        )
        return pb.RepositoryIndexResponse(
            models=[pb.RepositoryIndexResponse.ModelIndex(**one) for one in entries]
        )

    async def _repository_load(
        self, request: pb.RepositoryModelLoadRequest, context: Context
    ) -> pb.RepositoryModelLoadResponse:
        await model.load(
            self._service,
            self._intake.caller(context, Scope.ADMIN),
            request.model_name,
            request.repository_name,
            repository_parameters(request),
        )
        return pb.RepositoryModelLoadResponse()

    async def _repository_unload(
        self, request: pb.RepositoryModelUnloadRequest, context: Context
    ) -> pb.RepositoryModelUnloadResponse:
        await model.unload(
            self._service,
            self._intake.caller(context, Scope.ADMIN),
            request.model_name,
            request.repository_name,
            repository_parameters(request),
        )
        return pb.RepositoryModelUnloadResponse()

    def _engine(
        self,
        request: pb.ModelMetadataRequest | pb.ModelConfigRequest | pb.ModelStatisticsRequest,
        context: Context,
    ) -> EngineHandle:
        """The engine that the request names."""
        principal = self._intake.caller(context)
        return model.engine_of(self._service, principal, request.name, request.version)

    async def _model_infer(self, context: Context) -> pb.ModelInferResponse:
        principal = self._intake.caller(context)
        async with AsyncExitStack() as running:
            async with self._intake.request(context, principal, self._one_reply) as request:
                run = self._inference.run(request, principal, deadline(context))
                exchange = await running.enter_async_context(run)
            return response_of(exchange.request, Reply(await exchange.reply(), final=True))

    async def _model_stream_infer(self, context: Context) -> None:
        """Admit requests one after the other, and answer each as its outputs arrive."""
        principal = self._intake.caller(context)
        writer = _Writer(context, self._stalled_client_s)
        idle: CancelledError | None = None
        async with (
            self._intake.listening(context, principal) as listener,
            asyncio.TaskGroup() as answering,
        ):
            while idle is None:
                try:
                    data = await listener.next(writer.is_busy)
                except CancelledError as error:
                    idle = error  # raised within the task group, it would become an ExceptionGroup
                    continue
                if data is None:
                    break
                async with AsyncExitStack() as running:
                    exchange = await self._start(data, context, running, writer)
                    del data
                    if exchange is not None:
                        answer = self._answer(exchange, running.pop_all(), writer)
                        answering.create_task(answer)
        if idle is not None:
            raise idle

    async def _start(
        self, data: bytes, context: Context, running: AsyncExitStack, writer: "_Writer"
    ) -> Exchange | None:
        """Admit a request of a stream; None: it was refused, and the error has been sent."""
        request_id = ""
        try:
            principal = self._intake.caller(context)  # its key may have been revoked
            async with self._intake.parsed(principal, data, self._read_or_refuse) as request:
                if isinstance(request, _Refused):
                    request_id = request.request_id
                    raise request.error
                request_id = request.request_id
                run = self._inference.run(request, principal, deadline(context))
                return await running.enter_async_context(run)
        except TrtcError as error:
            refusal = stream_error(request_id, error)
        await writer.write([refusal])
        return None

    async def _answer(self, exchange: Exchange, running: AsyncExitStack, writer: "_Writer") -> None:
        request = exchange.request
        async with running, aclosing(exchange.replies()) as arriving:
            try:
                with writer.answering(exchange.streams):
                    async for replies in arriving:
                        await writer.write([stream_response_of(request, one) for one in replies])
            except TrtcError as error:
                await writer.write([stream_error(request.request_id, error)])

    def _one_reply(self, data: bytes) -> InferRequest:
        request = self._read(self._parse(data))
        request.check_one_reply()
        return request

    def _read_or_refuse(self, data: bytes) -> InferRequest | _Refused:
        request_id = ""
        try:
            message = self._parse(data)
            request_id = message.id
            return self._read(message)
        except TrtcError as error:
            return _Refused(request_id, error)

    def _parse(self, data: bytes) -> pb.ModelInferRequest:
        engines = self._service.engines.values()
        longest = max((engine.loop.bounds.max_context for engine in engines), default=0)
        return parse(methods.MODEL_INFER.request, data, max_numbers=MAX_NUMBERS + longest)

    def _read(self, message: pb.ModelInferRequest) -> InferRequest:
        return self._inference.read(
            message.model_name,
            message.model_version,
            message.id,
            tensors_of(message),
            outputs_of(message),
            parameters_of(message),
        )
