"""The routes of Text Generation Inference."""

from collections.abc import Sequence
from contextlib import AsyncExitStack

import msgspec

from trtc.protos.errors import UnavailableError
from trtc.runtime.frontends.http.exchange import Exchange
from trtc.runtime.frontends.http.routes import Route
from trtc.runtime.frontends.http.running import running
from trtc.runtime.frontends.http.tgi.answers import Info
from trtc.runtime.frontends.http.tgi.failures import refuse
from trtc.runtime.frontends.http.tgi.request_inputs import PARAMS, read_generate, request_input
from trtc.runtime.frontends.http.tgi.writing import Writer
from trtc.runtime.requests.naming import fields_as_sent
from trtc.runtime.requests.validation import MAX_STOPS
from trtc.runtime.service.service import Service
from trtc.version import __version__


def tgi(service: Service) -> Sequence[Route]:
    """The routes of generation, model information and health."""
    handlers = _Handlers(service)
    return (
        Route("/", {"POST": handlers.compatible}, refuse),
        Route("/generate", {"POST": handlers.generate}, refuse),
        Route("/generate_stream", {"POST": handlers.generate_stream}, refuse),
        Route("/info", {"GET": handlers.info}, refuse),
        Route("/health", {"GET": handlers.health}, refuse, scope=None, is_probe=True),
    )


class _Handlers:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def compatible(self, exchange: Exchange) -> None:
        """Generate, streamed or not by the field `stream`; InferenceClient uses this route."""
        await self._ask(exchange, stream=None)

    async def generate(self, exchange: Exchange) -> None:
        await self._ask(exchange, stream=False)

    async def generate_stream(self, exchange: Exchange) -> None:
        await self._ask(exchange, stream=True)

    async def info(self, exchange: Exchange) -> None:
        handle = self._service.engine_for(exchange.principal, "")
        facts = handle.info()
        info = Info(
            model_id=facts.name,
            model_sha=facts.engine_digest,
            model_dtype=facts.scheme,
            model_device_type=handle.manifest.target.kind,
            max_concurrent_requests=self._service.limits.max_streams,
            max_stop_sequences=MAX_STOPS,
            max_input_tokens=facts.max_seq_len - 1,
            max_total_tokens=facts.max_seq_len,
            version=__version__,
        )
        await exchange.answer(200, msgspec.json.encode(info))

    async def health(self, exchange: Exchange) -> None:
        if reasons := self._service.why_not_ready():
            name, reason = next(iter(reasons.items()))
            raise UnavailableError(
                f"engine {name} is not ready: {reason}", remedy="Ask again later"
            )
        await exchange.answer(200, b"")

    async def _ask(self, exchange: Exchange, *, stream: bool | None) -> None:
        request_id = f"tgi-{exchange.number}"
        service = self._service
        limit = service.limits.max_request_bytes
        async with AsyncExitStack() as stack:
            with fields_as_sent(PARAMS):
                async with exchange.document(service.intake, limit, read_generate) as parsed:
                    fields = parsed.given.fields
                    is_streamed = bool(fields.stream) if stream is None else stream
                    handle = service.engine_for(exchange.principal, fields.model or "")
                    handle.tokenizer_for("inputs")
                    one = request_input(parsed, request_id, stream=is_streamed)
                    run = await stack.enter_async_context(
                        running(service, (one,), exchange.principal)
                    )
                    tokenizer = run.engine.tokenizer_for("inputs")
                headers = ((b"x-request-id", request_id.encode()), *parsed.given.headers)
                writer = Writer(exchange, parsed, tokenizer, headers)
                if is_streamed:
                    await writer.events(run.outputs)
                else:
                    await writer.whole(run.outputs, listed=stream is None)
