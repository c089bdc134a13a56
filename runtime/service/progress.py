"""What is made of a request as it goes on: metrics, a tenant's tokens, a line of the audit log, a
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
"""The outcome of a request whose client went before its end."""


class Watcher(Protocol):
    """Follows one request."""

    def admit(self, request: GenerationRequest) -> None:
        """Its engine has it."""
        ...

    def deliver(self, outputs: Sequence[Output], at: float) -> None: ...

    def fail(self, outcome: str) -> None:
        """LEFT, or its error by the class in trtc.protos.errors; the first one counts."""
        ...


@dataclass(frozen=True)
class Progress:
    """Times are time.monotonic()."""

    clock: RequestClock
    usage: TenantStream
    watchers: Sequence[Watcher]

    def check(self, request: GenerationRequest) -> None:
        """Before its engine gets it: QueueFullError if the tenant has too few tokens for it."""
        self.usage.check_tokens(len(request.prompt_ids))

    def admit(self, request: GenerationRequest) -> None:
        """Its engine has it."""
        self.clock.admit(time.monotonic())
        self.usage.pay(len(request.prompt_ids))
        for one in self.watchers:
            one.admit(request)

    def deliver(self, outputs: Sequence[Output], at: float) -> None:
        self.usage.pay(self.clock.deliver(outputs, at))
        for one in self.watchers:
            one.deliver(outputs, at)

    def fail(self, error: TrtcError) -> None:
        """It ended with an error."""
        self.clock.fail(error)
        for one in self.watchers:
            one.fail(type(error).__name__)

    def leave(self) -> None:
        """Its client went before its end."""
        self.clock.fail(CancelledError("the client left"))
        for one in self.watchers:
            one.fail(LEFT)
