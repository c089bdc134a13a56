"""Conversations as text, by a checkpoint's own chat template."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trtc.protos.errors import CalibrationError, EnvironmentFault
from trtc.quant.quiet import quiet_libraries


@dataclass(frozen=True)
class Chat:
    """A conversation, which the model's chat template makes text of."""

    messages: tuple[tuple[str, str], ...]
    """(role, content)."""
    line: int
    """Of its file."""


def chat_texts(chats: Sequence[Chat], model_dir: Path, field: str) -> list[str]:
    """Each conversation, whole and without a prompt for more.

    Raises:
        CalibrationError: there is no template, or it refuses a conversation, whose line is named.
        EnvironmentFault: Transformers, whose sandbox renders it, is not installed.
    """
    try:
        from jinja2 import TemplateError
        from transformers import AutoTokenizer
    except ImportError as error:
        raise EnvironmentFault(
            f"has conversations, which need the package {error.name}, which is not installed",
            field=field,
            remedy="pip install 'trtc[build]'",
        ) from error
    with quiet_libraries():
        try:
            tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CalibrationError(
                f"has conversations, and the checkpoint's tokenizer cannot be loaded ({error})",
                field=field,
                remedy='Give lines with a "text"',
            ) from error
        if not tokenizer.chat_template:
            raise CalibrationError(
                "has conversations, and the checkpoint has no chat template",
                field=field,
                remedy='Give lines with a "text"',
            )
        texts = []
        for chat in chats:
            messages = [{"role": role, "content": content} for role, content in chat.messages]
            try:
                texts.append(str(tokenizer.apply_chat_template(messages, tokenize=False)))
            except (TemplateError, ValueError, TypeError, KeyError) as error:
                raise CalibrationError(
                    f"line {chat.line} is refused by the chat template ({error})",
                    field=field,
                    remedy="Give messages in the order that the model was trained on",
                ) from error
    return texts
