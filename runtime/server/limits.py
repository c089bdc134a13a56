"""What clients may ask of a server, whatever its engines would take."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ServiceLimits:
    """What one client may cost the server, whatever the engine would take."""

    max_streams: int = 4096
    """Calls that generate or tokenise at once, over all engines."""
    max_prompt_bytes: int = 4 << 20
    """UTF-8 bytes of a text prompt, or of a chat's messages together."""
    max_chat_messages: int = 1024
    max_unread_tokens: int = 4096
    """Tokens that a stream may hold for a reader that lags; beyond, its request is ended."""
