"""What both clients are but for their waiting: requests, keywords, and outputs as they come."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar, Unpack, overload

from trtc.protos.errors import TrtcError
from trtc.runtime.requests.completion import Collector
from trtc.runtime.requests.draft import RequestDraft
from trtc.runtime.requests.generate_options import (
    CHAT_KEYWORDS,
    GENERATE_KEYWORDS,
    ChatOptions,
    GenerateOptions,
    draft_of_chat,
    submit_prompts,
)
from trtc.runtime.requests.keywords import takes
from trtc.runtime.requests.prompts import Prompt, Prompts
from trtc.runtime.requests.request import Output
from trtc.runtime.text.chat_options import Message
from trtc.runtime.wire.messages import output_from_wire
from trtc.runtime.wire.methods import GENERATE

GenerationT = TypeVar("GenerationT", bound="BaseGeneration")


class BaseGeneration(ABC):
    """Outputs of a call, collected as they are read."""

    def __init__(self, request_id: str, address: str) -> None:
        self._address = address
        self._collector = Collector()
        self.request_id = request_id

    @abstractmethod
    def cancel(self) -> None:
        """End the request; reading on raises CancelledError."""

    def _take(self, message: bytes) -> Output:
        """The output in a message; one that cannot be read ends the request."""
        try:
            output = output_from_wire(GENERATE.parse(message))
        except TrtcError:
            self.cancel()
            raise
        self._collector.add(output)
        return output


class BaseClient(ABC, Generic[GenerationT]):
    """Makes requests; how a call is sent and waited for is the client's own."""

    def __init__(self, address: str, timeout: float | None) -> None:
        self.address = address
        self._timeout = timeout

    @overload
    def generate(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[GenerateOptions]
    ) -> GenerationT: ...

    @overload
    def generate(
        self, prompt: Prompts, *, timeout: float | None = None, **options: Unpack[GenerateOptions]
    ) -> list[GenerationT]: ...

    @takes(GENERATE_KEYWORDS)
    def generate(
        self,
        prompt: Prompt | Prompts,
        *,
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> GenerationT | list[GenerationT]:
        """Complete one prompt, or several.

        A text, or the token ids of one, gives one generation. A list of texts, or of lists of token
        ids, gives a list of generations in the order of the prompts: all run at once.

        Args:
            timeout: seconds that it may take; None: the client's.

        Raises:
            InvalidRequestError: the prompt is of another kind.
            UnavailableError: the client is closed.
        """
        return submit_prompts(prompt, options, lambda draft: self.submit(draft, timeout=timeout))

    @takes(CHAT_KEYWORDS)
    def chat(
        self,
        messages: Sequence[Message],
        *,
        timeout: float | None = None,
        **options: Unpack[ChatOptions],
    ) -> GenerationT:
        """Answer a conversation; messages and tools have the shapes of the OpenAI API.

        Args:
            timeout: seconds that it may take; None: the client's.

        Raises:
            InvalidRequestError: a message or an option has another shape.
            UnavailableError: the client is closed.
        """
        return self.submit(draft_of_chat(messages, options), timeout=timeout)

    @abstractmethod
    def submit(self, draft: RequestDraft, *, timeout: float | None = None) -> GenerationT:
        """Send a request as it is."""

    def _seconds(self, timeout: float | None) -> float | None:
        """A call's limit; None: none."""
        return self._timeout if timeout is None else timeout
