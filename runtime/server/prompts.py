"""Prompts of every kind become token ids, within the server's limits and off its loop when long."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from trtc.protos.errors import InvalidRequestError
from trtc.runtime.draft import ChatMessage, RequestDraft
from trtc.runtime.server.handle import EngineHandle
from trtc.runtime.server.limits import ServiceLimits
from trtc.runtime.tokenizer import Tokenizer

INLINE_TEXT_CHARACTERS = 2048
"""Texts up to this long are tokenised in the asyncio loop: sooner done than handed over."""


class Prompts:
    """Tokenises; close it to end its threads."""

    def __init__(self, limits: ServiceLimits) -> None:
        self._limits = limits
        # Templates and long texts; `tokenizers` works without the GIL.
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="trtc-tokenise")

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    async def ids(self, handle: EngineHandle, draft: RequestDraft) -> Sequence[int]:
        """Token ids of a request's prompt, of whichever kind; not yet checked as token ids."""
        if draft.token_ids is not None:
            return draft.token_ids
        if draft.chat is not None:
            return await self.chat_ids(handle, draft.chat)
        if draft.text is not None:
            return await self.text_ids(handle, draft.text, field="prompt.text")
        raise InvalidRequestError(
            "is missing", field="prompt", remedy="Give text, token_ids or chat"
        )

    async def chat_ids(self, handle: EngineHandle, chat: Sequence[ChatMessage]) -> Sequence[int]:
        """Token ids of a conversation in the engine's chat template."""
        tokenizer = handle.tokenizer_for("chat")
        if not chat:
            raise InvalidRequestError(
                "has no messages", field="chat.messages", remedy="Give at least one"
            )
        if len(chat) > self._limits.max_chat_messages:
            raise InvalidRequestError(
                f"has {len(chat)} messages",
                field="chat.messages",
                remedy=f"The server takes at most {self._limits.max_chat_messages}",
            )
        self._check_bytes([one.role + one.content for one in chat], "chat.messages")
        messages = [one.as_template_input() for one in chat]
        # A template is the engine's code: it runs in the sandbox, and off the loop.
        text = await asyncio.get_running_loop().run_in_executor(
            self._pool, tokenizer.apply_chat_template, messages
        )
        return await self._encode(tokenizer, text, False)

    async def text_ids(
        self, handle: EngineHandle, text: str, *, add_special_tokens: bool = True, field: str
    ) -> Sequence[int]:
        """Token ids of a text; `field` is where the request has it."""
        tokenizer = handle.tokenizer_for(field)
        self._check_bytes([text], field)
        return await self._encode(tokenizer, text, add_special_tokens)

    async def _encode(
        self, tokenizer: Tokenizer, text: str, add_special_tokens: bool
    ) -> Sequence[int]:
        if len(text) <= INLINE_TEXT_CHARACTERS:
            return tokenizer.encode(text, add_special_tokens)
        return await asyncio.get_running_loop().run_in_executor(
            self._pool, tokenizer.encode, text, add_special_tokens
        )

    def _check_bytes(self, texts: Sequence[str], field: str) -> None:
        size = sum(len(text.encode()) for text in texts)
        if size > self._limits.max_prompt_bytes:
            raise InvalidRequestError(
                f"has {size} bytes",
                field=field,
                remedy=f"The server takes at most {self._limits.max_prompt_bytes}",
            )
