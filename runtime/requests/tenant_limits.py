"""What one tenant may have of a server, beside what bounds every client."""

import msgspec


class TenantLimits(msgspec.Struct, frozen=True):
    """None: no limit but the server's."""

    requests_per_minute: int | None = None
    """At once, and again evenly over each minute."""
    tokens_per_minute: int | None = None
    """Of prompts and completions together, likewise."""
    max_streams: int | None = None
    """Generations open at once."""
    max_context: int | None = None
    """Prompt and completion tokens of a sequence."""
    priority: int = 0
    """Added to the priority that a request asks for."""
    weight: float = 1.0
    """Its share of an engine while others wait, in proportion to their weights."""
    models: frozenset[str] | None = None
    """Engines that it may use, by name; None: all."""
    cache_salt: str = ""
    """Another one makes prefixes unreachable that were cached under the last."""

    def may_use(self, model: str) -> bool:
        return self.models is None or model in self.models

    @property
    def counts(self) -> bool:
        """Whether there is anything to count."""
        limits = (self.requests_per_minute, self.tokens_per_minute, self.max_streams)
        return any(one is not None for one in limits)


NO_LIMITS = TenantLimits()
