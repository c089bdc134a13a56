"""Limits of one tenant, in addition to the limits of every client."""

import msgspec


class TenantLimits(msgspec.Struct, frozen=True):
    """Limits of one tenant; None: only the server's limits."""

    requests_per_minute: int | None = None
    """A token bucket of this size, refilled evenly over each minute."""
    tokens_per_minute: int | None = None
    """The same for tokens of prompts and completions."""
    max_streams: int | None = None
    """Most concurrent generations."""
    max_context: int | None = None
    """Prompt and completion tokens of a sequence."""
    priority: int = 0
    """Added to the priority of each request."""
    weight: float = 1.0
    """Weight of its share of an engine while other clients wait."""
    models: frozenset[str] | None = None
    """Engines that it may use, by name; None: all."""
    cache_salt: str = ""
    """Salt of its cached prefixes; changing it makes those cached before unreachable."""

    def may_use(self, model: str) -> bool:
        return self.models is None or model in self.models

    @property
    def counts(self) -> bool:
        """Whether it limits requests or tokens per minute."""
        limits = (self.requests_per_minute, self.tokens_per_minute, self.max_streams)
        return any(one is not None for one in limits)


NO_LIMITS = TenantLimits()
