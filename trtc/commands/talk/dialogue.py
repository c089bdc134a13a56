"""The state of a conversation: what was said, and how answers are drawn."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trtc.commands.conversation import read_json
from trtc.commands.talk.answers import Answer
from trtc.protos.errors import RequestError
from trtc.protos.files import UnreadableError, read_file
from trtc.runtime.text.chat_options import chat_of
from trtc.runtime.text.template_options import Message

_MAX_FILE_BYTES = 64 << 20


@dataclass
class Dialogue:
    system: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    """Options of requests that differ from the model's defaults."""
    said: list[Message] = field(default_factory=list)
    """Oldest first, without the system message."""
    last: Answer | None = None
    _own_files: set[Path] = field(default_factory=set)
    """Those that this conversation was saved to or loaded from, which it may write again."""

    def messages(self) -> Sequence[Message]:
        """With the system message."""
        if self.system is None:
            return list(self.said)
        return [{"role": "system", "content": self.system}, *self.said]

    def ask(self, text: str) -> None:
        self.said.append({"role": "user", "content": text})

    def answered(self, answer: Answer) -> None:
        """Keep an answer, or what there is of one; a question without any is taken back."""
        self.last = answer
        if answer.text:
            self.said.append({"role": "assistant", "content": answer.text})
        else:
            self.said.pop()

    def clear(self) -> None:
        self.said.clear()
        self.last = None

    def save(self, path: Path) -> None:
        """Write the messages as `--messages` of `trtc client` and `trtc generate` reads them.

        Raises:
            RequestError: the file cannot be written, or is not this conversation's.
        """
        mode = "w" if path.absolute() in self._own_files else "x"
        try:
            with path.open(mode, encoding="utf-8") as file:
                json.dump(self.messages(), file, ensure_ascii=False, indent=1)
                file.write("\n")
        except FileExistsError:
            raise RequestError("exists", field=str(path), remedy="Give another name") from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise RequestError(f"cannot be written ({reason})", field=str(path)) from error
        self._own_files.add(path.absolute())

    def load(self, path: Path) -> None:
        """Go on with the messages of a file.

        Raises:
            RequestError: it cannot be read, or is no conversation.
            InvalidRequestError: a message has another shape; names it.
        """
        try:
            text = read_file(path, _MAX_FILE_BYTES).decode()
        except (UnreadableError, UnicodeDecodeError) as error:
            raise RequestError(str(error), field=str(path)) from error
        messages: list[Message] = read_json(str(path), text, list)
        chat_of(messages, {})
        self.system = None
        if messages and _is_system(messages[0]):
            self.system = messages[0]["content"]
            messages = messages[1:]
        self.clear()
        self.said = list(messages)
        self._own_files.add(path.absolute())


def _is_system(message: Mapping[str, Any]) -> bool:
    return message["role"] == "system" and isinstance(message.get("content"), str)
