"""What tenants use of their limits: requests and tokens a minute, streams, models.

A generation says how many tokens its prompt has once they are known, and pays for tokens as they
come. Clients without limits of their own are not counted.
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
"""When a stream ends is not known: the Retry-After that clients receive."""


@dataclass
class _Usage:
    """Of one tenant. Buckets are made when a limit is first met, and follow it when it changes."""

    buckets: dict[str, TokenBucket] = field(default_factory=dict)
    per_minute: dict[str, int] = field(default_factory=dict)
    num_streams: int = 0

    def bucket(self, unit: str, per_minute: int | None, now: float) -> TokenBucket | None:
        """None: there is no limit."""
        if per_minute is None:
            return None
        if unit not in self.buckets:
            self.buckets[unit] = TokenBucket(per_minute, now)
        elif self.per_minute[unit] != per_minute:
            self.buckets[unit].change_rate(per_minute, now)
        self.per_minute[unit] = per_minute
        return self.buckets[unit]


class TenantStream:
    """A generation of a tenant, which pays for its tokens."""

    def __init__(self, limits: TenantLimits, usage: _Usage, now: Callable[[], float]) -> None:
        self._limits = limits
        self._now = now
        self._tokens = usage.bucket("tokens", limits.tokens_per_minute, now())

    def check_tokens(self, amount: int) -> None:
        """Raises QueueFullError while the tenant's tokens do not suffice for so many."""
        if self._tokens is not None:
            _check(self._tokens, amount, self._limits.tokens_per_minute, "tokens", self._now())

    def pay(self, num_tokens: int) -> None:
        """Tokens were used."""
        if self._tokens is not None and num_tokens:
            self._tokens.take(num_tokens, self._now())


class Quotas:
    """For one thread.

    Args:
        now: seconds of a clock that does not go back.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._usage: dict[str, _Usage] = {}
        """By tenant, of those with limits: no client can make it grow."""

    @contextmanager
    def stream(self, principal: Principal, model: str) -> Iterator[TenantStream]:
        """Count a request that generates, and its stream until the context is left.

        Raises:
            ForbiddenError: the tenant may not use the model.
            QueueFullError: it has as many streams as it may, or has used its tokens or requests;
                `retry_after_s` says how long to wait.
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
        stream.check_tokens(1)  # who has none is refused before the prompt costs anything
        self.take_request(principal, model)
        usage.num_streams += 1
        try:
            yield stream
        finally:
            usage.num_streams -= 1

    def take_request(self, principal: Principal, model: str) -> None:
        """Count a request; errors as of `stream`."""
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
