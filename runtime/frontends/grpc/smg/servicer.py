"""trtllm.TrtllmService over gRPC, as a thin layer over the service.

Requests name no model, so they go to the server's only engine.
"""

import uuid
from contextlib import AsyncExitStack, aclosing
from functools import partial

from msgspec.structs import replace

from trtc.protos.errors import UnknownModelError, UnknownRequestError, UnsupportedError
from trtc.protos.smg import trtllm_service_pb2 as pb
from trtc.runtime.engine.handle import EngineHandle
from trtc.runtime.frontends.grpc.calls import (
    STALLED_CLIENT_S,
    Context,
    GrpcService,
    deadline,
    probe,
    streaming,
    unary,
    writing,
)
from trtc.runtime.frontends.grpc.intake import Intake
from trtc.runtime.frontends.grpc.smg import methods
from trtc.runtime.frontends.grpc.smg.kv_events import Subscribers, batches_from
from trtc.runtime.frontends.grpc.smg.replies import Ends, Replies
from trtc.runtime.frontends.grpc.smg.requests import NAMES, input_of
from trtc.runtime.requests.naming import fields_as_sent
from trtc.runtime.requests.principal import Scope
from trtc.runtime.requests.request_input import RequestInput
from trtc.runtime.service.service import Service
from trtc.runtime.wire.bounded import MAX_NUMBERS, parse
from trtc.version import __version__


class TrtllmServicer:
    """The handlers of trtllm.TrtllmService."""

    def __init__(
        self,
        service: Service,
        intake: Intake,
        *,
        kv_events: bool = False,
        stalled_client_s: float = STALLED_CLIENT_S,
    ) -> None:
        """
        Args:
            kv_events: whether SubscribeKvEvents is served.
        """
        self._has_kv_events = kv_events
        self._subscribers = Subscribers()
        self._service = service
        self._intake = intake
        self._stalled_client_s = stalled_client_s

    def grpc_service(self) -> GrpcService:
        """The service, for a port."""
        intake = self._intake
        return GrpcService(
            pb.DESCRIPTOR,
            {
                methods.GENERATE.name: streaming(methods.GENERATE, self._generate),
                methods.HEALTH_CHECK.name: probe(intake, methods.HEALTH_CHECK, self._health_check),
                methods.ABORT.name: unary(intake, methods.ABORT, self._abort),
                methods.GET_MODEL_INFO.name: unary(
                    intake, methods.GET_MODEL_INFO, self._get_model_info
                ),
                methods.GET_SERVER_INFO.name: unary(
                    intake, methods.GET_SERVER_INFO, self._get_server_info
                ),
                methods.SUBSCRIBE_KV_EVENTS.name: streaming(
                    methods.SUBSCRIBE_KV_EVENTS, self._subscribe_kv_events
                ),
            },
            probes=frozenset({methods.HEALTH_CHECK.name}),
        )

    async def _generate(self, context: Context) -> None:
        principal = self._intake.caller(context)
        async with AsyncExitStack() as running:
            async with self._intake.request(context, principal, self._read) as (
                request_input,
                replies,
            ):
                with fields_as_sent(NAMES):
                    generation = self._service.generate(
                        request_input, principal=principal, deadline=deadline(context)
                    )
                    del request_input
                    stream = await running.enter_async_context(generation)
            with fields_as_sent(NAMES):
                async for outputs in stream:
                    with writing((stream,), self._stalled_client_s):
                        for response in replies.responses(outputs):
                            await context.write(response)

    async def _subscribe_kv_events(self, context: Context) -> None:
        principal = self._intake.caller(context, Scope.EVENTS)
        log = self._service.engine_for(principal, self._engine().name).loop.kv_events
        if log is None or not self._has_kv_events:
            raise UnsupportedError(
                "KV events are not served", remedy="Start the server with --kv-events-grpc"
            )
        read = partial(parse, methods.SUBSCRIBE_KV_EVENTS.request)
        async with self._intake.request(context, principal, read) as request:
            first = request.start_sequence_number
        with self._subscribers.place():
            async with aclosing(batches_from(log, first)) as messages:
                async for message in messages:
                    with writing(()):
                        await context.write(message)

    def _read(self, data: bytes) -> tuple[RequestInput, Replies]:
        handle = self._engine()
        bounds = handle.loop.bounds
        # embedding_bias has a number for every token of the vocabulary.
        most = MAX_NUMBERS + bounds.max_context + bounds.vocab_size
        request = parse(methods.GENERATE.request, data, max_numbers=most)
        request_input = input_of(request, bounds)
        request_input = replace(
            request_input,
            model=handle.name,
            request_id=request_input.request_id or uuid.uuid4().hex,
        )
        eos = () if request_input.ignore_eos else handle.manifest.model.eos_token_ids
        ends = Ends(
            frozenset(eos),
            frozenset(request_input.stop_token_ids),
            request.include_stop_token_in_output,
        )
        return request_input, Replies(request, request_input.request_id, ends, request_input.n)

    def _engine(self) -> EngineHandle:
        """The only engine; raises UnknownModelError if there are several, or UnavailableError."""
        if len(self._service.names) > 1:
            raise UnknownModelError(
                f"{methods.SERVICE} names no model, and the server has several",
                remedy="Ask a `trtc serve` that serves one engine",
            )
        return self._service.engine("")

    def _engine_for(self, context: Context) -> EngineHandle:
        """The only engine; raises ForbiddenError if the caller may not use it."""
        return self._service.engine_for(self._intake.caller(context), self._engine().name)

    async def _health_check(self, request: object, context: Context) -> pb.HealthCheckResponse:
        why_not = self._service.why_not_ready()
        problems = [f"{name}: {reason}" for name, reason in why_not.items()]
        return pb.HealthCheckResponse(status="; ".join(problems) or "OK")

    async def _abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        try:
            self._service.abort("", request.request_id, self._intake.caller(context))
        except UnknownRequestError as error:
            return pb.AbortResponse(success=False, message=str(error))
        return pb.AbortResponse(success=True)

    async def _get_model_info(self, request: object, context: Context) -> pb.GetModelInfoResponse:
        handle = self._engine_for(context)
        model, limits = handle.manifest.model, handle.manifest.limits
        context_tokens = handle.loop.bounds.max_context
        return pb.GetModelInfoResponse(
            model_id=handle.name,
            max_input_len=context_tokens - 1,
            max_seq_len=context_tokens,
            max_batch_size=limits.max_batch_size,
            vocab_size=model.vocab_size,
            hidden_size=model.hidden_size,
            num_layers=model.num_layers,
        )

    async def _get_server_info(self, request: object, context: Context) -> pb.GetServerInfoResponse:
        target = self._engine_for(context).manifest.target
        return pb.GetServerInfoResponse(
            version=__version__,
            backend=f"trtc {target.kind}",
            tensor_parallel_size=target.tp,
            pipeline_parallel_size=1,
            context_parallel_size=1,
            world_size=target.tp,
        )
