"""A model's chat template, and the special tokens that it may name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ChatTemplate:
    """A template that nobody has compiled yet: most engines never need Jinja."""

    source: str
    special_tokens: Mapping[str, str]

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt for the assistant's next message.

        Raises:
            InvalidRequestError: the template refuses the messages, or goes over a bound.
            NoTokenizerError: the template is not valid Jinja, or too long.
        """
        from trtc.runtime.chat_sandbox import render  # Jinja takes 20 ms to import

        return render(self.source, self.special_tokens, messages)
