"""Passes the progress of a request to its observers: metrics, the tenant's quota, the audit log, a
trace, a timeline."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from trtc.protos.errors import CancelledError, TrtcError
from trtc.runtime.requests.request import GenerationRequest, Output
from trtc.runtime.service.metrics import RequestClock
from trtc.runtime.service.quotas import TenantStream

LEFT = "left"
"""Outcome of a request whose client disconnected before its end."""


class Watcher(Protocol):
    """Observes one request."""

    def admit(self, request: GenerationRequest) -> None:
        """The engine has accepted the request."""
        ...

    def deliver(self, outputs: Sequence[Output], at: float) -> None: ...

    def fail(self, outcome: str) -> None:
        """The request ended without a result. `outcome`: LEFT, or the error's class in
        trtc.protos.errors; the first call counts."""
        ...


@dataclass(frozen=True)
class Progress:
    """The observers of one request. Times are time.monotonic()."""

    clock: RequestClock
    usage: TenantStream
    watchers: Sequence[Watcher]

    def check(self, request: GenerationRequest) -> None:
        """Called before the request is submitted; raises QueueFullError if the tenant has too few
        tokens left."""
        self.usage.check_tokens(len(request.prompt_ids))

    def admit(self, request: GenerationRequest) -> None:
        """The engine has accepted the request."""
        self.clock.admit(time.monotonic())
        self.usage.pay(len(request.prompt_ids))
        for one in self.watchers:
            one.admit(request)

    def deliver(self, outputs: Sequence[Output], at: float) -> None:
        self.usage.pay(self.clock.deliver(outputs, at))
        for one in self.watchers:
            one.deliver(outputs, at)

    def fail(self, error: TrtcError) -> None:
        """The request ended with an error."""
        self.clock.fail(error)
        for one in self.watchers:
            one.fail(type(error).__name__)

    def leave(self) -> None:
        """The client disconnected before the request's end."""
        self.clock.fail(CancelledError("the client left"))
        for one in self.watchers:
            one.fail(LEFT)
