"""Enforces the limits of tenants: requests and tokens per minute, streams, models.

A generation checks the quota for its prompt's tokens once they are known, and is charged for tokens
as they are computed. Clients without limits of their own are not counted.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from trtc.protos.errors import ForbiddenError, QueueFullError
from trtc.runtime.requests.principal import Principal
from trtc.runtime.requests.tenant_limits import TenantLimits
from trtc.runtime.service.token_bucket import TokenBucket

FULL_STREAMS_RETRY_S = 1.0
"""Retry-After if all streams are in use; when one will end is unknown."""


@dataclass
class _Usage:
    """Usage of one tenant. Buckets are made when a limit first applies, and follow its changes."""

    buckets: dict[str, TokenBucket] = field(default_factory=dict)
    per_minute: dict[str, int] = field(default_factory=dict)
    num_streams: int = 0

    def bucket(self, unit: str, per_minute: int | None, now: float) -> TokenBucket | None:
        """The bucket of a limit; None: there is no limit."""
        if per_minute is None:
            return None
        if unit not in self.buckets:
            self.buckets[unit] = TokenBucket(per_minute, now)
        elif self.per_minute[unit] != per_minute:
            self.buckets[unit].change_rate(per_minute, now)
        self.per_minute[unit] = per_minute
        return self.buckets[unit]


class TenantStream:
    """A generation of a tenant, which is charged for its tokens."""

    def __init__(self, limits: TenantLimits, usage: _Usage, now: Callable[[], float]) -> None:
        self._limits = limits
        self._now = now
        self._tokens = usage.bucket("tokens", limits.tokens_per_minute, now())

    def check_tokens(self, amount: int) -> None:
        """Raises QueueFullError if the tenant has fewer than `amount` tokens left."""
        if self._tokens is not None:
            _check(self._tokens, amount, self._limits.tokens_per_minute, "tokens", self._now())

    def pay(self, num_tokens: int) -> None:
        """Charge the tenant for tokens."""
        if self._tokens is not None and num_tokens:
            self._tokens.take(num_tokens, self._now())


class Quotas:
    """The quotas of all tenants. Not thread-safe.

    Args:
        now: a monotonic clock, in seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._usage: dict[str, _Usage] = {}
        """Usage by tenant, only of tenants with limits, so that clients cannot make it grow."""

    @contextmanager
    def stream(self, principal: Principal, model: str) -> Iterator[TenantStream]:
        """Count a generation request, and its stream until the context is left.

        Raises:
            ForbiddenError: the tenant may not use the model.
            QueueFullError: the tenant has no stream, tokens or requests left; `retry_after_s` is
                the time to wait.
        """
        limits = principal.limits
        usage = self._of(principal) if limits.counts else _Usage()
        if limits.max_streams is not None and usage.num_streams >= limits.max_streams:
            raise QueueFullError(
                f"this tenant has its limit of {limits.max_streams} open streams",
                remedy="Wait until one of them has ended",
                limit="tenant_streams",
                retry_after_s=FULL_STREAMS_RETRY_S,
            )
        stream = TenantStream(limits, usage, self._now)
        stream.check_tokens(1)  # refuse before the prompt is tokenised
        self.take_request(principal, model)
        usage.num_streams += 1
        try:
            yield stream
        finally:
            usage.num_streams -= 1

    def take_request(self, principal: Principal, model: str) -> None:
        """Count a request; raises the errors of `stream`."""
        self.check_model(principal, model)
        per_minute = principal.limits.requests_per_minute
        if per_minute is None:
            return
        now = self._now()
        bucket = self._of(principal).bucket("requests", per_minute, now)
        assert bucket is not None
        _check(bucket, 1, per_minute, "requests", now)
        bucket.take(1, now)

    def check_model(self, principal: Principal, model: str) -> None:
        """Raises ForbiddenError if the tenant may not use the model."""
        limits = principal.limits
        if not limits.may_use(model):
            raise ForbiddenError(
                f"this tenant may not use {model!r}",
                field="model",
                remedy=f"Choose one of: {', '.join(sorted(limits.models or ()))}",
            )

    def _of(self, principal: Principal) -> _Usage:
        return self._usage.setdefault(principal.name, _Usage())


def _check(bucket: TokenBucket, amount: int, per_minute: int | None, unit: str, now: float) -> None:
    if (wait_s := bucket.wait_s(amount, now)) > 0:
        raise QueueFullError(
            f"this tenant has used its {per_minute} {unit} a minute",
            remedy=f"Try again in {math.ceil(wait_s)} seconds",
            limit=f"tenant_{unit}",
            retry_after_s=wait_s,
        )
