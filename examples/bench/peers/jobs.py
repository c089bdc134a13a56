"""What a worker process is asked to do, as JSON on its stdin.

The workers run in the contestants' own environments: nothing but the standard library here, and
little of it, since what is imported delays a cold start.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

from examples.bench.peers.failures import RunFailed

if TYPE_CHECKING:
    from examples.bench.peers.processes import Finished

Kind = Literal["generate", "first_token", "chat"]


@dataclass(frozen=True)
class Job:
    """One measured piece of work in a process of its own."""

    kind: Kind
    """generate: all prompts at once. first_token: one prompt, one token, a line as soon as it is
    there. chat: `prompts` are the turns' new tokens, see `Chat`."""
    model: str
    """Where the engine or the converted model is."""
    prompts: list[list[int]]
    output_len: int
    """New tokens a prompt, or a turn; end-of-sequence tokens are ignored."""
    threads: int
    warmup: list[int]
    """A prompt that is completed before the clock starts; empty: the start is what is measured."""
    prefix_cache: bool = False
    """Whether what an earlier prompt left may be used again."""
    step_tokens: int = 512
    """OpenVINO: tokens of one step, prompts cut to fit."""
    dummy_weights: bool = False
    """trtc: the engine was built without weights."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def read_job() -> Job:
    return Job(**json.load(sys.stdin))


@dataclass(frozen=True)
class RawTrace:
    """When one request's tokens came; seconds of one monotonic clock."""

    sent_at: float
    arrivals: list[tuple[float, int]]
    """(time, tokens) of each delivery."""


def answer(value: object) -> None:
    """Print the answer as the last line."""
    print(json.dumps(value), flush=True)


def answer_traces(traces: Sequence[RawTrace]) -> None:
    answer([asdict(trace) for trace in traces])


def read_traces(done: "Finished") -> list[RawTrace]:
    """What a worker gave to `answer_traces`."""
    return [RawTrace(**trace) for trace in done.last_json()]


Complete = Callable[[Sequence[int], int], list[int]]
"""(prompt, new tokens) -> their ids."""


def chat_seconds(complete: Complete, turns: Sequence[Sequence[int]], reply_len: int) -> float:
    """Wall time of a conversation: every turn's prompt is all that was said before it.

    Args:
        turns: what is added before each reply; the first holds the system prompt.

    Raises:
        RunFailed: a reply of another length.
    """
    said: list[int] = []
    began = time.perf_counter()
    for added in turns:
        said += added
        reply = complete(said, reply_len)
        if len(reply) != reply_len:
            raise RunFailed(f"{len(reply)} tokens came instead of {reply_len}")
        said += reply
    return time.perf_counter() - began
