"""POST /v1/responses: an answer of items, whole or as events; responses are not stored."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import msgspec

from trtc.protos.errors import InvalidRequestError, TrtcError
from trtc.protos.sampling import SAMPLING_PARAMETERS
from trtc.runtime.engine.handle import EngineHandle
from trtc.runtime.frontends.http.bodies import Given, read
from trtc.runtime.frontends.http.events import begin_events
from trtc.runtime.frontends.http.exchange import Exchange, Headers
from trtc.runtime.frontends.http.messages import chat_messages
from trtc.runtime.frontends.http.openai.fields import ResponseFields
from trtc.runtime.frontends.http.openai.items import joined, messages_of
from trtc.runtime.frontends.http.openai.params import RESPONSE
from trtc.runtime.frontends.http.openai.request_inputs import common
from trtc.runtime.frontends.http.openai.response_events import Response
from trtc.runtime.frontends.http.openai.writing import DONE
from trtc.runtime.frontends.http.running import OutputBatch, running
from trtc.runtime.frontends.http.structured import grammar_of, text_format
from trtc.runtime.requests.naming import fields_as_sent
from trtc.runtime.requests.request_input import RequestInput
from trtc.runtime.requests.tool_choice import AUTO, tool_choice
from trtc.runtime.service.service import Service
from trtc.runtime.text.chat import ChatMessage
from trtc.runtime.text.chat_options import chat_of

LOGPROBS = "message.output_text.logprobs"
"""Value of `include` that requests log-probabilities."""


class ResponsesHandler:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def create(self, exchange: Exchange) -> None:
        """Answer with a response."""
        response_id = f"resp_{exchange.number}"

        def parse(body: bytes) -> tuple[Given[ResponseFields], RequestInput]:
            given = read(body, ResponseFields)
            with fields_as_sent(RESPONSE):
                return given, response_input(given.fields, response_id)

        service = self._service
        async with AsyncExitStack() as stack:
            async with exchange.document(
                service.intake, service.limits.max_request_bytes, parse
            ) as (given, request_input):
                with fields_as_sent(RESPONSE):
                    run = await stack.enter_async_context(
                        running(service, (request_input,), exchange.principal)
                    )
            response = self._response(given.fields, response_id, run.engine)
            headers = ((b"x-request-id", response_id.encode()), *given.headers)
            with fields_as_sent(RESPONSE):
                if given.fields.stream:
                    await _write_events(exchange, run.outputs, response, headers)
                else:
                    await _write_whole(exchange, run.outputs, response, headers)

    def _response(self, fields: ResponseFields, response_id: str, engine: EngineHandle) -> Response:
        given = {one.name: getattr(fields, one.name) for one in SAMPLING_PARAMETERS}
        in_force: dict[str, Any] = {
            **{one.name: one.default for one in SAMPLING_PARAMETERS},
            **engine.info().sampling_defaults,
            **{name: value for name, value in given.items() if value is not None},
        }
        return Response(
            id=response_id,
            model=engine.name,
            fields=fields,
            sampling=in_force,
            wants_logprobs=_logprobs(fields) is not None,
        )


def response_input(fields: ResponseFields, response_id: str) -> RequestInput:
    """The request input of a response.

    Raises:
        InvalidRequestError: a field is invalid; names RequestInput's field (`params.RESPONSE`).
    """
    if fields.input is None:
        raise InvalidRequestError("is missing", field="input", remedy="Give a text or items")
    asked = None if fields.text is None else text_format(fields.text.format, "text.format")
    messages = chat_messages(messages_of(fields.input))
    with fields_as_sent({"reasoning_effort": "reasoning.effort"}):
        chat = chat_of(
            messages,
            {
                "chat_template_kwargs": fields.chat_template_kwargs or {},
                "enable_thinking": fields.enable_thinking,
                "reasoning_effort": fields.reasoning.effort if fields.reasoning else None,
                "tools": fields.tools or (),
            },
        )
    chat = replace(chat, messages=joined(chat.messages))
    if fields.instructions is not None:
        system = ChatMessage("system", fields.instructions)
        chat = replace(chat, messages=(system, *chat.messages))
    return RequestInput(
        chat=chat,
        request_id=response_id,
        max_tokens=fields.max_output_tokens,
        logprobs=_logprobs(fields),
        grammar=grammar_of(fields, asked),
        tool_choice=tool_choice(fields.tool_choice) or AUTO,
        splits_answer=True,
        parallel_tool_calls=fields.parallel_tool_calls is not False,
        thinking_token_budget=fields.thinking_token_budget,
        **common(fields),
    )


def _logprobs(fields: ResponseFields) -> int | None:
    if fields.top_logprobs or LOGPROBS in (fields.include or ()):
        return fields.top_logprobs or 0
    return None


async def _write_whole(
    exchange: Exchange, outputs: AsyncIterator[OutputBatch], response: Response, headers: Headers
) -> None:
    async for batch in outputs:
        for _, output in batch:
            response.take(output)
    await exchange.answer(200, msgspec.json.encode(response.whole()), headers=headers)


async def _write_events(
    exchange: Exchange, outputs: AsyncIterator[OutputBatch], response: Response, headers: Headers
) -> None:
    await begin_events(exchange, headers)
    await exchange.write(response.first_events())
    try:
        async for batch in outputs:
            events = [one for _, output in batch for one in response.take(output)]
            if events:
                await exchange.write(response.encoded(events))
    except TrtcError as error:
        response.fail(error)
    await exchange.end(response.last_events() + DONE)
