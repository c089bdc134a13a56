"""The times of one request's events, without its content.

arrived --tokenise--> admitted --queue--> scheduled --prefill--> first token --decode--> ended
"""

import math
from collections.abc import Callable, Sequence

import msgspec

from trtc.runtime.requests.principal import Principal
from trtc.runtime.requests.request import GenerationRequest, Output

MAX_MARKS = 64
"""Most deliveries whose times are kept. If there are more, every second one is dropped, again and
again."""
MAX_ID_CHARACTERS = 80
ANONYMOUS = "anonymous"


class RequestTimes(msgspec.Struct, kw_only=True):
    """A request's times. Seconds count from its arrival; None: not yet, or unknown."""

    number: int
    """Unique in the server."""
    request_id: str
    client: str
    """`tenant NAME`, or `anonymous`."""
    model: str
    arrived_at: float
    """time.monotonic()."""
    prompt_tokens: int
    cached_prompt_tokens: int | None = None
    completion_tokens: int = 0
    """Tokens so far, of all sequences."""
    admitted_s: float
    """When the engine accepted it."""
    scheduled_s: float | None = None
    """Start of the first step that computed it; unknown before the request's end."""
    first_token_s: float | None = None
    last_token_s: float | None = None
    ended_s: float | None = None
    outcome: str = ""
    """`ok`, `left`, or an error by its class in trtc.protos.errors; "": it runs."""
    finish_reasons: tuple[str, ...] = ()
    marks: tuple[float, ...] = ()
    """Times of deliveries of tokens, at most MAX_MARKS."""


class Timeline:
    """Records the times of one request from its arrival on (implements Watcher).

    Args:
        now: time.monotonic, or a fake clock in tests.
        latency: called with the name and the seconds of each duration.
    """

    def __init__(
        self,
        number: int,
        principal: Principal,
        model: str,
        now: Callable[[], float],
        latency: Callable[[str, float], None],
    ) -> None:
        self.number = number
        self.client = ANONYMOUS if principal.is_anonymous else principal.name
        self.model = model
        self.arrived_at = now()
        self.is_admitted = False
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.outcome = ""
        """Set when the request fails."""
        self.is_refused = False
        self._now = now
        self._latency = latency
        self._request_id = ""
        self._cached_prompt_tokens: int | None = None
        self._admitted_at = 0.0
        self._queue_s: float | None = None
        self._first_at: float | None = None
        self._last_at = 0.0
        self._ended_at: float | None = None
        self._finish_reasons: list[str] = []
        self._marks: list[float] = []
        self._stride = 1
        self._num_deliveries = 0

    def admit(self, request: GenerationRequest) -> None:
        """The engine has accepted the request."""
        self.is_admitted = True
        self._admitted_at = self._now()
        self._request_id = request.request_id[:MAX_ID_CHARACTERS]
        self.prompt_tokens = len(request.prompt_ids)

    def deliver(self, outputs: Sequence[Output], at: float) -> None:
        if num_tokens := sum(len(one.token_ids) for one in outputs):
            self.completion_tokens += num_tokens
            if self._first_at is None:
                self._first_at = at
                self._latency("first_token", at - self.arrived_at)
            else:
                self._latency("between_tokens", at - self._last_at)
            self._last_at = at
            self._mark(at)
        for output in outputs:
            if output.finish_reason is not None:
                self._finish_reasons.append(output.finish_reason.value)
            if output.usage is not None:
                self._ended_at = at
                self._cached_prompt_tokens = output.usage.cached_prompt_tokens
                self._queue_s = output.usage.queue_s
                if self._queue_s is not None:
                    self._latency("queue", self._queue_s)

    def refuse(self) -> None:
        """The request was not admitted."""
        self.is_refused = True

    def fail(self, outcome: str) -> None:
        """The first failure is the outcome."""
        self.outcome = self.outcome or outcome

    def end(self) -> None:
        """The request has ended."""
        self.outcome = self.outcome or "ok"
        if self._ended_at is None:
            self._ended_at = self._now()

    def times(self) -> RequestTimes:
        """The times known so far."""
        # The engine may compute before this thread notes that it took the request.
        soonest = math.inf if self._first_at is None else self._first_at
        admitted_at = min(self._admitted_at, soonest)
        scheduled_at = None if self._queue_s is None else min(admitted_at + self._queue_s, soonest)
        return RequestTimes(
            number=self.number,
            request_id=self._request_id,
            client=self.client,
            model=self.model,
            arrived_at=self.arrived_at,
            prompt_tokens=self.prompt_tokens,
            cached_prompt_tokens=self._cached_prompt_tokens,
            completion_tokens=self.completion_tokens,
            admitted_s=self._since_arrival(admitted_at),
            scheduled_s=None if scheduled_at is None else self._since_arrival(scheduled_at),
            first_token_s=None if self._first_at is None else self._since_arrival(self._first_at),
            last_token_s=None if self._first_at is None else self._since_arrival(self._last_at),
            ended_s=None if self._ended_at is None else self._since_arrival(self._ended_at),
            outcome=self.outcome,
            finish_reasons=tuple(self._finish_reasons),
            marks=tuple(self._marks),
        )

    def _mark(self, at: float) -> None:
        if self._num_deliveries % self._stride == 0:
            self._marks.append(self._since_arrival(at))
            if len(self._marks) > MAX_MARKS:
                del self._marks[1::2]
                self._stride *= 2
        self._num_deliveries += 1

    def _since_arrival(self, at: float) -> float:
        return round(at - self.arrived_at, 6)
