"""Opened engines whose steps take few tokens, so that prompts are prefilled in chunks."""

from typing import Any, cast

import msgspec

from trtc.runtime.engine.session import Session
from trtc.runtime.executors.base import Executor


class _SmallSteps:
    """An executor that says it takes fewer tokens than it does."""

    def __init__(self, executor: Executor, max_num_tokens: int) -> None:
        self._executor = executor
        self.limits = msgspec.structs.replace(executor.limits, max_num_tokens=max_num_tokens)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)


def with_small_steps(session: Session, max_num_tokens: int) -> Session:
    """The same engine, `max_num_tokens` a step."""
    assert max_num_tokens < session.executor.limits.max_num_tokens
    executor = cast(Executor, _SmallSteps(session.executor, max_num_tokens))
    return msgspec.structs.replace(session, executor=executor)
