"""Limits of a server's clients, independent of its engines."""

from dataclasses import dataclass

from trtc.runtime.engine.admission import PromptLimits


@dataclass(frozen=True)
class ServiceLimits:
    """Limits of a server's clients, independent of its engines."""

    max_streams: int = 4096
    """Most concurrent calls that generate or tokenise, over all engines."""
    max_connection_streams: int = 512
    """Most concurrent calls of one connection; the client queues further ones."""
    max_connections: int = 1024
    """Most connections of each port. A further one is closed at once; over HTTP it replaces an idle
    one."""
    max_request_bytes: int = 4 << 20
    """Most bytes of a request on the wire."""
    max_bytes_in_flight: int = 256 << 20
    """Most bytes of requests that are being read, parsed or tokenised; further ones wait unread."""
    max_prompt_bytes: int = 4 << 20
    """Most UTF-8 bytes of a text prompt, or of all messages of a chat."""
    max_chat_messages: int = 1024
    max_priority: int = 0
    """The highest priority that clients may request."""
    share_prefixes: bool = False
    """Whether all anonymous clients share cached prefixes; only if they trust each other."""
    max_unread_tokens: int = 4096
    """Most unread tokens of a stream; the request of a slower reader is ended."""

    @property
    def prompts(self) -> PromptLimits:
        return PromptLimits(self.max_prompt_bytes, self.max_chat_messages)
