"""Tokenises prompts in threads, long ones in a separate thread; threads that wait for processes
render chats and compile grammars."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from trtc.protos.errors import InvalidRequestError
from trtc.runtime.engine.admission import SHORT_TEXT_CHARACTERS, Admission, Work
from trtc.runtime.engine.handle import EngineHandle
from trtc.runtime.requests.principal import Principal
from trtc.runtime.service.fair_turns import FairTurns
from trtc.runtime.text.chat_workers import RenderLimits

LONG_TEXT_CHARACTERS = 1 << 16
"""Texts from this length on are tokenised one at a time, in a thread of their own."""
MAX_DETOKENIZED = 1 << 18
"""Most tokens of one call."""
_COMPILING = 2
"""Most grammars that are compiled concurrently."""
_COMPILE_WAIT_S = 20.0

T = TypeVar("T")


class Prompts:
    """Runs the work of admissions; close it to end its threads."""

    def __init__(self) -> None:
        # `tokenizers` releases the GIL.
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="trtc-tokenise")
        self._long_pool = ThreadPoolExecutor(1, thread_name_prefix="trtc-tokenise-long")
        # These threads only wait for the processes that render.
        self._chat_pool = ThreadPoolExecutor(thread_name_prefix="trtc-chat")
        self._chat_turns: dict[str, FairTurns] = {}
        """Turns by engine, since each has its own processes."""
        self._grammar_pool = ThreadPoolExecutor(_COMPILING, thread_name_prefix="trtc-grammar")
        self._grammar_turns = FairTurns(
            capacity=_COMPILING,
            per_client=max(1, _COMPILING - 1),
            wait_s=_COMPILE_WAIT_S,
            name="the processes that compile grammars",
        )

    def close(self) -> None:
        for pool in (self._pool, self._long_pool):
            pool.shutdown(wait=True, cancel_futures=True)
        # Renderings in progress end with their engine's processes.
        self._chat_pool.shutdown(wait=False, cancel_futures=True)
        self._grammar_pool.shutdown(wait=False, cancel_futures=True)

    async def run(self, engine: EngineHandle, principal: Principal, admission: Admission[T]) -> T:
        """Run an admission to `engine`; returns its result."""
        result: Any = None
        while True:
            try:
                work = admission.send(result)
            except StopIteration as done:
                return done.value  # type: ignore[no-any-return]
            result = await self._do(engine, principal, work)

    async def detokenize(
        self, engine: EngineHandle, token_ids: Sequence[int], *, keep_special_tokens: bool
    ) -> str:
        """The text of a sequence of tokens."""
        tokenizer = engine.tokenizer_for("token_ids")
        _check_tokens(token_ids, engine.manifest.model.vocab_size)

        def decode() -> str:
            return tokenizer.decode(token_ids, skip_special=not keep_special_tokens)

        if len(token_ids) <= SHORT_TEXT_CHARACTERS:
            return decode()
        return await asyncio.get_running_loop().run_in_executor(self._long_pool, decode)

    async def _do(self, engine: EngineHandle, principal: Principal, work: Work) -> Any:
        """Do the work in a suitable thread; short texts in this one, which is faster than passing
        them on."""
        loop = asyncio.get_running_loop()
        if work.renders:
            async with self._turns_at(engine).turn(principal.group):
                return await loop.run_in_executor(self._chat_pool, work.run)
        if work.compiles:
            async with self._grammar_turns.turn(principal.group):
                return await loop.run_in_executor(self._grammar_pool, work.run)
        if work.num_characters <= SHORT_TEXT_CHARACTERS:
            return work.run()
        is_long = work.num_characters > LONG_TEXT_CHARACTERS
        return await loop.run_in_executor(self._long_pool if is_long else self._pool, work.run)

    def _turns_at(self, engine: EngineHandle) -> FairTurns:
        limits = RenderLimits()
        return self._chat_turns.setdefault(
            engine.name,
            FairTurns(
                capacity=limits.processes,
                per_client=max(1, limits.processes - 1),
                wait_s=limits.wait_seconds,
                name="the processes that render chat templates",
            ),
        )


def _check_tokens(token_ids: Sequence[int], vocab_size: int) -> None:
    if len(token_ids) > MAX_DETOKENIZED:
        raise InvalidRequestError(
            f"has {len(token_ids)} tokens",
            field="token_ids",
            remedy=f"Give at most {MAX_DETOKENIZED} in one call",
        )
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        position = next(at for at, one in enumerate(token_ids) if not 0 <= one < vocab_size)
        raise InvalidRequestError(
            f"{token_ids[position]} is not a token",
            field=f"token_ids[{position}]",
            remedy=f"Token ids are from 0 to {vocab_size - 1}",
        )
