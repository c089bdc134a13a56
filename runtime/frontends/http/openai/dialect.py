"""The routes of the OpenAI API; each goes from fields to request inputs, outputs and answer."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from trtc.protos.errors import InvalidRequestError, UnavailableError
from trtc.runtime.frontends.http.bodies import Given, read
from trtc.runtime.frontends.http.exchange import Exchange, Headers
from trtc.runtime.frontends.http.openai.answers import Model, ModelList
from trtc.runtime.frontends.http.openai.failures import refuse
from trtc.runtime.frontends.http.openai.fields import (
    ChatFields,
    ChoiceFields,
    CompletionFields,
    StreamOptions,
)
from trtc.runtime.frontends.http.openai.forms import (
    ChatForm,
    CompletionForm,
    EchoedPrompt,
    Form,
    ResponseOptions,
)
from trtc.runtime.frontends.http.openai.params import CHAT, COMPLETION, Params
from trtc.runtime.frontends.http.openai.request_inputs import chat_input, completion_inputs
from trtc.runtime.frontends.http.openai.responses import ResponsesHandler
from trtc.runtime.frontends.http.openai.tokens import TokensHandler
from trtc.runtime.frontends.http.openai.writing import (
    Head,
    UsageOptions,
    write_events,
    write_whole,
)
from trtc.runtime.frontends.http.routes import Route
from trtc.runtime.frontends.http.running import Running, running
from trtc.runtime.requests.model_info import ModelInfo
from trtc.runtime.requests.naming import fields_as_sent
from trtc.runtime.requests.principal import Principal
from trtc.runtime.requests.request_input import RequestInput
from trtc.runtime.requests.tools import shown
from trtc.runtime.service.service import Service

MODELS = "/v1/models"
FITTING = -1
"""As `truncate_prompt_tokens`: as many tokens as fit."""
MAX_TRUNCATE = (1 << 31) - 1

T = TypeVar("T")


def openai(service: Service) -> Sequence[Route]:
    """The routes of models, chat completions, completions, responses and token ids."""
    handlers, tokens = _Handlers(service), TokensHandler(service)
    return (
        Route(MODELS, {"GET": handlers.models}, refuse),
        Route(f"{MODELS}/", {"GET": handlers.model}, refuse),
        Route("/v1/chat/completions", {"POST": handlers.chat}, refuse),
        Route("/v1/completions", {"POST": handlers.completions}, refuse),
        Route("/v1/responses", {"POST": ResponsesHandler(service).create}, refuse),
        Route("/tokenize", {"POST": tokens.tokenize}, refuse),
        Route("/detokenize", {"POST": tokens.detokenize}, refuse),
    )


class _Handlers:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._created = int(time.time())

    async def models(self, exchange: Exchange) -> None:
        """List the models that are ready; routers use this as a readiness check."""
        if reasons := self._service.why_not_ready():
            name, reason = next(iter(reasons.items()))
            raise UnavailableError(
                f"engine {name} is not ready: {reason}", field="model", remedy="Ask again later"
            )
        models = [self._model(one) for one in self._service.info("", exchange.principal)]
        await exchange.answer(200, msgspec.json.encode(ModelList(models)))

    async def model(self, exchange: Exchange) -> None:
        name = exchange.path.removeprefix(f"{MODELS}/")
        (info,) = self._service.info(name, exchange.principal)
        await exchange.answer(200, msgspec.json.encode(self._model(info)))

    async def chat(self, exchange: Exchange) -> None:
        request_id = f"chatcmpl-{exchange.number}"

        def parse(body: bytes) -> tuple[Given[ChatFields], RequestInput]:
            given = read(body, ChatFields)
            return given, chat_input(given.fields, request_id)

        async with AsyncExitStack() as stack:
            async with self._document(exchange, parse) as (given, request_input):
                fields = given.fields
                with fields_as_sent(_chat_params(fields)):
                    if _needs_ids(fields):
                        request_input = await self._with_ids(
                            request_input, fields, exchange.principal
                        )
                    run = await stack.enter_async_context(
                        running(self._service, (request_input,), exchange.principal)
                    )
            options = _options(fields, logprobs=bool(fields.logprobs))
            form = ChatForm(options, request_input.n, [EchoedPrompt(request_input.token_ids or ())])
            with fields_as_sent(_chat_params(fields)):
                await self._write(exchange, given, run, request_id, form)

    async def completions(self, exchange: Exchange) -> None:
        request_id = f"cmpl-{exchange.number}"

        def parse(body: bytes) -> tuple[Given[CompletionFields], tuple[RequestInput, ...]]:
            given = read(body, CompletionFields)
            return given, completion_inputs(given.fields, request_id)

        async with AsyncExitStack() as stack:
            async with self._document(exchange, parse) as (given, request_inputs):
                fields = given.fields
                with fields_as_sent(COMPLETION):
                    prompts = [
                        await self._echoed(one, fields, exchange.principal)
                        for one in request_inputs
                    ]
                    run = await stack.enter_async_context(
                        running(
                            self._service,
                            [
                                _over(one, prompt)
                                for one, prompt in zip(request_inputs, prompts, strict=True)
                            ],
                            exchange.principal,
                        )
                    )
            form = CompletionForm(
                _options(fields, logprobs=fields.logprobs is not None),
                request_inputs[0].n,
                prompts,
                is_echo_only=fields.max_tokens == 0,
            )
            with fields_as_sent(COMPLETION):
                await self._write(exchange, given, run, request_id, form)

    def _document(
        self, exchange: Exchange, parse: Callable[[bytes], T]
    ) -> AbstractAsyncContextManager[T]:
        service = self._service
        return exchange.document(service.intake, service.limits.max_request_bytes, parse)

    async def _write(
        self,
        exchange: Exchange,
        given: Given[Any],
        run: Running,
        request_id: str,
        form: Form,
    ) -> None:
        fields: ChoiceFields = given.fields
        engine, outputs = run.engine, run.outputs
        head = Head(request_id, int(time.time()), engine.name, engine.manifest.digest)
        headers: Headers = ((b"x-request-id", request_id.encode()), *given.headers)
        if not fields.stream:
            await write_whole(exchange, outputs, head, form, headers)
            return
        options = fields.stream_options or StreamOptions()
        usage = UsageOptions(
            at_end=bool(options.include_usage), always=bool(options.continuous_usage_stats)
        )
        await write_events(exchange, outputs, head, form, usage, headers)

    async def _with_ids(
        self, request_input: RequestInput, fields: ChoiceFields, principal: Principal
    ) -> RequestInput:
        """The request input with its prompt as token ids, of which the last ones if it is to be
        truncated."""
        ids: Sequence[int] = request_input.token_ids or ()
        if request_input.chat is not None:
            chat = shown(request_input.chat, request_input.tool_choice)
            ids = await self._service.tokenize_chat(request_input.model, chat, principal)
        elif request_input.text is not None:
            special = getattr(fields, "add_special_tokens", None)
            ids = await self._service.tokenize_text(
                request_input.model, request_input.text, special is not False, principal
            )
        if fields.truncate_prompt_tokens is not None:
            most = self._most_prompt_tokens(request_input, fields.truncate_prompt_tokens, principal)
            ids = ids[-most:]
        return replace(request_input, text=None, token_ids=tuple(ids))

    def _most_prompt_tokens(
        self, request_input: RequestInput, truncate: int, principal: Principal
    ) -> int:
        """How many tokens of a prompt are kept.

        Raises:
            InvalidRequestError: `truncate` is neither positive nor -1.
        """
        if truncate != FITTING and not 1 <= truncate <= MAX_TRUNCATE:
            raise InvalidRequestError(
                f"is {truncate}",
                field="truncate_prompt_tokens",
                remedy=f"Give 1 to {MAX_TRUNCATE}, or {FITTING} for as many tokens as fit",
            )
        if truncate != FITTING:
            return truncate
        engine = self._service.engine_for(principal, request_input.model)
        fits = engine.loop.bounds.max_context
        if principal.limits.max_context is not None:
            fits = min(fits, principal.limits.max_context)
        return max(1, fits - (request_input.max_tokens or 1))

    async def _echoed(
        self, request_input: RequestInput, fields: CompletionFields, principal: Principal
    ) -> EchoedPrompt:
        """The prompt's part of the answer."""
        scored = bool(fields.echo) and fields.logprobs is not None
        needs_ids = scored or _needs_ids(fields) or fields.add_special_tokens is False
        text = request_input.text or ""
        if fields.truncate_prompt_tokens is not None:
            text = ""  # that of the tokens which are kept
        if needs_ids:
            request_input = await self._with_ids(request_input, fields, principal)
        ids = request_input.token_ids or ()
        if fields.echo and not text:
            text = await self._text(request_input.model, ids, principal)
        first = await self._text(request_input.model, ids[:1], principal) if scored else ""
        return EchoedPrompt(ids, text if fields.echo else "", first)

    async def _text(self, model: str, ids: Sequence[int], principal: Principal) -> str:
        return await self._service.detokenize(model, ids, True, principal)

    def _model(self, info: ModelInfo) -> Model:
        return Model(
            id=info.name,
            created=self._created,
            max_model_len=info.max_seq_len,
            root=info.name,
            grammars=info.grammars or UNSET,
        )


def _chat_params(fields: ChatFields) -> Params:
    if fields.max_completion_tokens is None:
        return CHAT
    return {**CHAT, "max_tokens": "max_completion_tokens"}


def _needs_ids(fields: ChoiceFields) -> bool:
    """Whether the prompt's token ids are needed before the request."""
    options = fields.stream_options
    return bool(
        fields.return_token_ids
        or fields.truncate_prompt_tokens is not None
        or (options and options.continuous_usage_stats)
    )


def _over(request_input: RequestInput, prompt: EchoedPrompt) -> RequestInput:
    """The request input with the token ids of an echoed prompt, if they are known."""
    return (
        replace(request_input, text=None, token_ids=prompt.token_ids)
        if prompt.token_ids
        else request_input
    )


def _options(fields: ChoiceFields, *, logprobs: bool) -> ResponseOptions:
    stop = fields.stop
    return ResponseOptions(
        logprobs=logprobs,
        prompt_logprobs=fields.prompt_logprobs is not None,
        token_ids=bool(fields.return_token_ids),
        tokens_by_id=bool(fields.return_tokens_as_token_ids),
        stop_token_ids=frozenset(fields.stop_token_ids or ()),
        stop=frozenset({stop} if isinstance(stop, str) else stop or ()),
    )
