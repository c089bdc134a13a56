"""Token ids of conversations, without an admission."""

from trtc.runtime.text.chat import Chat
from trtc.runtime.text.tokenizer import Tokenizer


def chat_ids(tokenizer: Tokenizer, chat: Chat) -> tuple[int, ...]:
    """Of a chat in the tokenizer's template, which writes its special tokens itself."""
    text = tokenizer.apply_chat_template(chat.template_input())
    return tokenizer.encode(text, add_special_tokens=False)
