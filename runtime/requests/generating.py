"""`generate`, `chat` and closing, for engines in this process and for clients of a server.

These differ in how a request input is sent (`submit`) and how its outputs are awaited.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Generic, Self, TypeVar, Unpack, overload

from trtc.runtime.requests.completion import Collector, Result
from trtc.runtime.requests.generate_options import (
    CHAT_KEYWORDS,
    GENERATE_KEYWORDS,
    Cancellable,
    ChatOptions,
    GenerateOptions,
    input_of_chat,
    submit_prompts,
)
from trtc.runtime.requests.keywords import takes
from trtc.runtime.requests.prompts import Prompt, Prompts
from trtc.runtime.requests.request import Output
from trtc.runtime.requests.request_input import RequestInput
from trtc.runtime.text.template_options import Message

GenerationT = TypeVar("GenerationT", bound=Cancellable)


class Generating(ABC, Generic[GenerationT]):
    """Completes prompts and answers conversations."""

    @abstractmethod
    def submit(self, request_input: RequestInput, *, timeout: float | None = None) -> GenerationT:
        """Submit a request; it runs concurrently with all others that have not ended.

        Args:
            timeout: seconds after which it ends with DeadlineError; None: the client's default, if
                it has one.
        """

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
        ids, gives a list of generations in the order of the prompts, which run concurrently.

        Args:
            timeout: seconds that it may take; None: the client's default, if it has one.

        Raises:
            InvalidRequestError: a field is invalid; names it.
            NoTokenizerError: a text for an engine without a tokenizer.
            UnavailableError: the engine or the client is closed.
        """
        return submit_prompts(
            prompt, options, lambda request_input: self.submit(request_input, timeout=timeout)
        )

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
            timeout: seconds that it may take; None: the client's default, if it has one.

        Raises:
            InvalidRequestError: a message or an option has another shape, or a field is invalid;
                names it.
            NoTokenizerError: the engine has no tokenizer.
            UnavailableError: the engine or the client is closed.
        """
        return self.submit(input_of_chat(messages, options), timeout=timeout)


class Closing(ABC):
    """A context manager that closes itself at the end."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class BaseGeneration(ABC):
    """Outputs of a request, collected as they are read."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self._collector = Collector()

    @abstractmethod
    def cancel(self) -> None:
        """End the request."""


class BlockingGeneration(BaseGeneration, Iterator[Output]):
    """A running completion: iterate over its outputs, or wait for all of it with `result`.

    Leaving its `with` block, or dropping it, cancels the request if it has not ended.
    """

    def result(self) -> Result:
        """Read the remaining outputs and return the complete result."""
        for _ in self:
            pass
        return self._collector.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()
