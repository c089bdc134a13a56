"""vLLM's routes /tokenize and /detokenize."""

from collections.abc import Sequence
from typing import Any

import msgspec

from trtc.protos.errors import InvalidRequestError
from trtc.runtime.frontends.http.bodies import Given, read
from trtc.runtime.frontends.http.exchange import Exchange
from trtc.runtime.frontends.http.openai.fields import DetokenizeFields, TokenizeFields
from trtc.runtime.frontends.http.openai.params import CHAT, COMPLETION, DETOKENIZE
from trtc.runtime.frontends.http.openai.request_inputs import conversation
from trtc.runtime.requests.naming import fields_as_sent
from trtc.runtime.requests.principal import Principal
from trtc.runtime.service.service import Service
from trtc.runtime.text.chat import Chat


class TokensHandler:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def tokenize(self, exchange: Exchange) -> None:
        """Answer with the token ids of a text, or of a conversation in the chat template."""

        def parse(body: bytes) -> tuple[Given[TokenizeFields], str | Chat]:
            given = read(body, TokenizeFields)
            return given, _prompt(given.fields)

        service, principal = self._service, exchange.principal
        async with exchange.document(service.intake, service.limits.max_request_bytes, parse) as (
            given,
            prompt,
        ):
            model = given.fields.model or ""
            length = service.engine_for(principal, model).manifest.limits.max_seq_len
            ids = await self._ids(model, prompt, given.fields, principal)
        answer = {"count": len(ids), "max_model_len": length, "tokens": ids, "token_strs": None}
        await exchange.answer(200, msgspec.json.encode(answer), headers=given.headers)

    async def detokenize(self, exchange: Exchange) -> None:
        """Answer with the text of token ids; special tokens included, as in vLLM."""

        def parse(body: bytes) -> tuple[Given[DetokenizeFields], list[int]]:
            given = read(body, DetokenizeFields)
            if given.fields.tokens is None:
                raise InvalidRequestError("is missing", field="tokens", remedy="Give token ids")
            return given, given.fields.tokens

        service = self._service
        async with exchange.document(service.intake, service.limits.max_request_bytes, parse) as (
            given,
            ids,
        ):
            with fields_as_sent(DETOKENIZE):
                text = await service.detokenize(
                    given.fields.model or "", ids, True, exchange.principal
                )
        body = msgspec.json.encode({"prompt": text})
        await exchange.answer(200, body, headers=given.headers)

    async def _ids(
        self, model: str, prompt: str | Chat, fields: TokenizeFields, principal: Principal
    ) -> Sequence[int]:
        if isinstance(prompt, Chat):
            with fields_as_sent(CHAT):
                return await self._service.tokenize_chat(model, prompt, principal)
        special = fields.add_special_tokens is not False
        with fields_as_sent(COMPLETION):
            return await self._service.tokenize_text(model, prompt, special, principal)


def _prompt(fields: TokenizeFields) -> str | Chat:
    given: list[Any] = [one for one in (fields.prompt, fields.messages) if one is not None]
    if len(given) != 1:
        raise InvalidRequestError(
            "is given beside messages" if given else "is missing",
            field="prompt",
            remedy="Give one of prompt and messages",
        )
    return conversation(fields) if fields.prompt is None else fields.prompt
