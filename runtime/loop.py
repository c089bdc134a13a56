"""One engine's loop: plan, execute, sample, apply, emit."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trtc.protos.errors import InvariantError, TrtcError
from trtc.runtime.executors.base import Executor
from trtc.runtime.request import GenerationRequest, Output
from trtc.runtime.tokenizer import Tokenizer
from trtc.runtime.validation import RequestBounds

Delivery = Sequence[Output] | TrtcError
Sink = Callable[[Delivery], None]


@dataclass(frozen=True)
class LoopConfig:
    """How one engine is driven."""

    eos_token_ids: tuple[int, ...] = ()
    max_queue: int = 1024
    """Requests that may wait; one more is refused with QueueFullError."""
    max_num_tokens: int | None = None
    """Tokens a step; None: the engine's limit. Smaller: steadier decodes, slower prefill."""
    prefix_cache: bool = True
    ageing_s: float = 10.0
    """Seconds of waiting that weigh as much as one step of priority."""


@dataclass(frozen=True)
class LoopStats:
    """A snapshot; counters grow from the loop's start."""

    running: int = 0
    """Sequences that hold pages."""
    waiting: int = 0
    """Sequences in the queue, preempted ones included."""
    pages_total: int = 0
    pages_used: int = 0
    """Held by running sequences."""
    pages_cached: int = 0
    """Held only by the prefix cache: free at need."""
    pages_free: int = 0
    prefix_query_tokens: int = 0
    """Prompt tokens looked up in the prefix cache."""
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    """Tokens prefilled, recomputed ones included."""
    generated_tokens: int = 0
    requests_admitted: int = 0
    requests_finished: int = 0
    """Ended with a result, aborted ones included."""
    requests_failed: int = 0
    """Ended with an error."""
    step_seconds: float = 0.0
    """Time spent in the executor."""


class EngineLoop:
    """Drives one executor from one thread. All methods may be called from any thread."""

    def __init__(self, executor: Executor, tokenizer: Tokenizer | None, config: LoopConfig) -> None:
        raise InvariantError("under construction")

    @property
    def bounds(self) -> RequestBounds:
        """What a request may ask of this engine."""
        raise InvariantError("under construction")

    def start(self) -> None:
        """Start the thread."""

    def submit(self, request: GenerationRequest, sink: Sink) -> None:
        """Queue a request. From then on `sink` is called from the loop's thread, at most once a
        step: with the request's new Outputs (the very last carries `usage`), or exactly once, and
        last, with a TrtcError.

        Raises:
            InvalidRequestError: a field is out of range, or the id is of a live request.
            NoTokenizerError: stop strings without a tokenizer.
            DeadlineError: the deadline has passed.
            QueueFullError: too many requests wait.
            UnavailableError: draining, stopped or dead.
        """

    def abort(self, request_id: str) -> bool:
        """End a request; its sequences finish with ABORTED. False: it is not live."""
        raise InvariantError("under construction")

    def healthy(self) -> bool:
        """Whether the thread runs and the executor works."""
        raise InvariantError("under construction")

    def drain(self, timeout: float | None) -> bool:
        """Refuse new requests and wait until the live ones have ended; False at the timeout."""
        raise InvariantError("under construction")

    def stop(self) -> None:
        """End the thread; live requests get UnavailableError. Idempotent. The executor
        stays open."""

    def stats(self) -> LoopStats:
        raise InvariantError("under construction")
