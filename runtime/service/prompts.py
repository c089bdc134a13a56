"""Prompts of every kind become token ids, within the server's limits and off its loop when long."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from trtc.protos.errors import InvalidRequestError
from trtc.runtime.engine.handle import EngineHandle
from trtc.runtime.requests.draft import RequestDraft
from trtc.runtime.requests.principal import Principal
from trtc.runtime.service.fair_turns import FairTurns
from trtc.runtime.service.limits import ServiceLimits
from trtc.runtime.text.chat import Chat
from trtc.runtime.text.chat_workers import RenderLimits
from trtc.runtime.text.tokenizer import Tokenizer

INLINE_TEXT_CHARACTERS = 2048
"""Texts up to this long are tokenised in the asyncio loop: sooner done than handed over."""
LONG_TEXT_CHARACTERS = 1 << 16
"""Texts from this length on wait for each other, and for no others."""
MAX_DETOKENIZED = 1 << 18
"""Tokens of one call."""


class Prompts:
    """Tokenises; close it to end its threads."""

    def __init__(self, limits: ServiceLimits) -> None:
        self._limits = limits
        # `tokenizers` works without the interpreter's lock.
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="trtc-tokenise")
        self._long_pool = ThreadPoolExecutor(1, thread_name_prefix="trtc-tokenise-long")
        # These threads only wait for the processes that render.
        self._chat_pool = ThreadPoolExecutor(thread_name_prefix="trtc-chat")
        self._chat_turns: dict[str, FairTurns] = {}
        """By engine, as each has its own processes."""

    def close(self) -> None:
        for pool in (self._pool, self._long_pool):
            pool.shutdown(wait=True, cancel_futures=True)
        # A rendering ends with its engine's processes.
        self._chat_pool.shutdown(wait=False, cancel_futures=True)

    async def ids(
        self, handle: EngineHandle, draft: RequestDraft, principal: Principal
    ) -> Sequence[int]:
        """Token ids of a request's prompt, of whichever kind; not yet checked as token ids."""
        if draft.token_ids is not None:
            return draft.token_ids
        if draft.chat is not None:
            return await self.chat_ids(handle, draft.chat, principal)
        if draft.text is not None:
            return await self.text_ids(handle, draft.text, field="prompt.text")
        raise InvalidRequestError(
            "is missing", field="prompt", remedy="Give text, token_ids or chat"
        )

    async def chat_ids(
        self, handle: EngineHandle, chat: Chat, principal: Principal
    ) -> Sequence[int]:
        """Token ids of a conversation in the engine's chat template."""
        tokenizer = handle.tokenizer_for("chat")
        if len(chat.messages) > self._limits.max_chat_messages:
            raise InvalidRequestError(
                f"has {len(chat.messages)} messages",
                field="chat.messages",
                remedy=f"The server takes at most {self._limits.max_chat_messages}",
            )
        self._check_bytes(chat.num_bytes, "chat")

        def render() -> str:
            return tokenizer.apply_chat_template(chat.template_input())

        async with self._turns_at(handle).turn(principal.group):
            text = await asyncio.get_running_loop().run_in_executor(self._chat_pool, render)
        return await self._encode_prompt(handle, tokenizer, text, False, "chat")

    async def text_ids(
        self, handle: EngineHandle, text: str, *, add_special_tokens: bool = True, field: str
    ) -> Sequence[int]:
        """Token ids of a text; `field` is where the request has it."""
        tokenizer = handle.tokenizer_for(field)
        self._check_bytes(len(text.encode()), field)
        return await self._encode_prompt(handle, tokenizer, text, add_special_tokens, field)

    async def detokenize(
        self, handle: EngineHandle, token_ids: Sequence[int], *, keep_special_tokens: bool
    ) -> str:
        """The text of a sequence of tokens."""
        tokenizer = handle.tokenizer_for("token_ids")
        _check_tokens(token_ids, handle.manifest.model.vocab_size)

        def decode() -> str:
            return tokenizer.decode(token_ids, skip_special=not keep_special_tokens)

        if len(token_ids) <= INLINE_TEXT_CHARACTERS:
            return decode()
        return await asyncio.get_running_loop().run_in_executor(self._long_pool, decode)

    async def _encode_prompt(
        self, handle: EngineHandle, tokenizer: Tokenizer, text: str, special: bool, field: str
    ) -> Sequence[int]:
        """Token ids of a text that is a prompt; refuses what cannot fit before tokenising it."""
        if len(text) <= INLINE_TEXT_CHARACTERS:
            return tokenizer.encode(text, special)

        def encode() -> Sequence[int]:
            _check_fit(tokenizer, text, handle.loop.bounds.max_context, field)
            return tokenizer.encode(text, special)

        pool = self._pool if len(text) <= LONG_TEXT_CHARACTERS else self._long_pool
        return await asyncio.get_running_loop().run_in_executor(pool, encode)

    def _turns_at(self, handle: EngineHandle) -> FairTurns:
        limits = RenderLimits()
        return self._chat_turns.setdefault(
            handle.name,
            FairTurns(
                capacity=limits.processes,
                per_client=max(1, limits.processes - 1),
                wait_s=limits.wait_seconds,
                name="the processes that render chat templates",
            ),
        )

    def _check_bytes(self, size: int, field: str) -> None:
        if size > self._limits.max_prompt_bytes:
            raise InvalidRequestError(
                f"has {size} bytes",
                field=field,
                remedy=f"The server takes at most {self._limits.max_prompt_bytes}",
            )


def _check_fit(tokenizer: Tokenizer, text: str, max_context: int, field: str) -> None:
    """Refuse a text that has too many tokens even if each is the longest that there is.

    Normalisers that shorten a text are not taken into account: what they would remove counts.
    """
    limit = max_context * tokenizer.longest_token
    size = len(text.encode())
    if size > limit:
        raise InvalidRequestError(
            f"has {size} bytes, more than {max_context} tokens can have",
            field=field,
            remedy=f"Shorten it: prompt and completion together may have {max_context} tokens",
        )


def _check_tokens(token_ids: Sequence[int], vocab_size: int) -> None:
    if len(token_ids) > MAX_DETOKENIZED:
        raise InvalidRequestError(
            f"has {len(token_ids)} tokens",
            field="token_ids",
            remedy=f"Give at most {MAX_DETOKENIZED} in one call",
        )
    if token_ids and max(token_ids) >= vocab_size:
        position = next(at for at, token in enumerate(token_ids) if token >= vocab_size)
        raise InvalidRequestError(
            f"{token_ids[position]} is not a token",
            field=f"token_ids[{position}]",
            remedy=f"Token ids are from 0 to {vocab_size - 1}",
        )
