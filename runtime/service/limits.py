"""What clients may ask of a server, whatever its engines would take."""

from dataclasses import dataclass

from trtc.runtime.engine.admission import PromptLimits


@dataclass(frozen=True)
class ServiceLimits:
    """What one client may cost the server, whatever the engine would take."""

    max_streams: int = 4096
    """Calls that generate or tokenise at once, over all engines."""
    max_connection_streams: int = 512
    """Calls of one connection that are open at once; its client keeps further ones."""
    max_connections: int = 1024
    """Of each port. One more is closed at once, over HTTP one that waits."""
    max_request_bytes: int = 4 << 20
    """Of a whole request on the wire."""
    max_bytes_in_flight: int = 256 << 20
    """Of requests that are being read, parsed and tokenised: further ones are not read yet."""
    max_prompt_bytes: int = 4 << 20
    """UTF-8 bytes of a text prompt, or of a chat's messages together."""
    max_chat_messages: int = 1024
    max_priority: int = 0
    """The highest priority that clients are granted; any lower one is theirs to ask for."""
    share_prefixes: bool = False
    """Whether anonymous clients share cached prefixes: all of them trust each other."""
    max_unread_tokens: int = 4096
    """Tokens that a stream may hold for a reader that lags; beyond, its request is ended."""

    @property
    def prompts(self) -> PromptLimits:
        return PromptLimits(self.max_prompt_bytes, self.max_chat_messages)
