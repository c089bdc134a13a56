"""What is made of a request as it goes on: metrics, a tenant's tokens, a line of the audit log."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from trtc.protos.errors import CancelledError, TrtcError
from trtc.runtime.requests.request import GenerationRequest, Output
from trtc.runtime.service.audit import LEFT, Record
from trtc.runtime.service.metrics import RequestClock
from trtc.runtime.service.quotas import TenantStream


@dataclass(frozen=True)
class Progress:
    """Times are time.monotonic()."""

    clock: RequestClock
    usage: TenantStream
    record: Record | None
    """None: nothing is recorded."""

    def check(self, request: GenerationRequest) -> None:
        """Before its engine gets it: QueueFullError if the tenant has too few tokens for it."""
        self.usage.check_tokens(len(request.prompt_ids))

    def admit(self, request: GenerationRequest) -> None:
        """Its engine has it."""
        self.clock.admit(time.monotonic())
        self.usage.pay(len(request.prompt_ids))
        if self.record is not None:
            self.record.admit(request)

    def deliver(self, outputs: Sequence[Output], at: float) -> None:
        self.usage.pay(self.clock.deliver(outputs, at))
        if self.record is not None:
            self.record.deliver(outputs, at)

    def fail(self, error: TrtcError) -> None:
        """It ended with an error."""
        self.clock.fail(error)
        if self.record is not None:
            self.record.fail(type(error).__name__)

    def leave(self) -> None:
        """Its client went before its end."""
        self.clock.fail(CancelledError("the client left"))
        if self.record is not None:
            self.record.fail(LEFT)
