"""A model's chat template, and the special tokens that it may use."""

import threading
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from trtc.protos.errors import InvalidRequestError

if TYPE_CHECKING:
    from trtc.runtime.text.chat_workers import ChatWorkers, RenderLimits

ONLY_MESSAGES: Mapping[str, Any] = MappingProxyType(
    {"tools": None, "documents": None, "add_generation_prompt": True}
)
"""Template variables of a conversation with messages only."""

_END_MARK = "END_OF_THE_MESSAGE_TO_CONTINUE "
"""Its trailing space shows whether the template strips messages."""


class ChatTemplate:
    """A chat template, which is compiled in a process at the first chat.

    Thread-safe. Close it to end its processes.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        limits: "RenderLimits | None" = None,
        *,
        tool_use: "ChatTemplate | None" = None,
    ) -> None:
        """
        Args:
            tool_use: template for conversations with tools, if the checkpoint has one of this name.
        """
        self.source = source
        self._tool_use = tool_use
        self._special_tokens = special_tokens
        self._limits = limits
        self._lock = threading.Lock()
        self._opened: ChatWorkers | None = None
        self._closed = False

    @property
    def is_invalid(self) -> bool:
        """Whether the template is known to be invalid, which the first chat detects."""
        return self._workers.is_invalid

    def has(self, text: str) -> bool:
        """Whether the template has a text in it."""
        return text in self.source or (self._tool_use is not None and self._tool_use.has(text))

    def close(self) -> None:
        """End its processes, including those that are rendering. Idempotent."""
        with self._lock:
            self._closed = True
            if self._opened is not None:
                self._opened.close()
        if self._tool_use is not None:
            self._tool_use.close()

    def compile(self) -> None:
        """Compile the template; `render` also does so.

        Raises:
            NoTokenizerError: the template is invalid.
        """
        self._workers.compile()
        if self._tool_use is not None:
            self._tool_use.compile()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] = ONLY_MESSAGES,
        *,
        continue_final_message: bool = False,
    ) -> str:
        """The prompt of a conversation.

        Args:
            messages: messages of a `chat.TemplateInput`, oldest first.
            variables: further template variables.
            continue_final_message: whether the prompt ends inside the last message, which must have
                a content.

        Raises:
            InvalidRequestError: the template refuses the messages, or exceeds a limit.
            NoTokenizerError: the template is not valid Jinja, or too long.
            QueueFullError: the processes that render were busy for too long.
        """
        if self._tool_use is not None and variables.get("tools") is not None:
            return self._tool_use.render(
                messages, variables, continue_final_message=continue_final_message
            )
        if not continue_final_message:
            return self._workers.render(messages, variables)
        marked, text = _with_mark(messages)
        return _before_mark(self._workers.render(marked, variables), text)

    @property
    def _workers(self) -> "ChatWorkers":
        with self._lock:
            if self._opened is None:
                # Imports subprocess and socket, which completions do not need.
                from trtc.runtime.text.chat_workers import ChatWorkers

                self._opened = ChatWorkers(self.source, self._special_tokens, self._limits)
                if self._closed:
                    self._opened.close()
            return self._opened


def _with_mark(
    messages: Sequence[Mapping[str, Any]],
) -> tuple[list[Mapping[str, Any]], str]:
    """The messages, with a marker appended to the last one's text; and that text."""
    last = dict(messages[-1])
    content = last.get("content")
    if not content:
        raise _not_continued("the last message has no content")
    if isinstance(content, str):
        said = content
        last["content"] = content + _END_MARK
    else:
        *before, part = content
        said = part["text"]
        last["content"] = [*before, {**part, "text": said + _END_MARK}]
    return [*messages[:-1], last], said


def _before_mark(text: str, said: str) -> str:
    """The prompt before the marker. Templates may strip a message, and so remove the marker's space
    and whitespace of the message.

    Args:
        said: the last message's text.
    """
    at = text.rfind(_END_MARK.strip())
    if at < 0 or said.strip() not in text:
        raise _not_continued("the template drops a part of the last message")
    keeps_space = text.startswith(_END_MARK, at)
    return text[:at] if keeps_space else text[:at].rstrip()


def _not_continued(problem: str) -> InvalidRequestError:
    return InvalidRequestError(
        problem,
        field="chat.continue_final_message",
        remedy="Leave it out, or end with a message whose text the template keeps",
    )
