"""Names of RequestInput's fields in requests, so that errors name the client's fields."""

from collections.abc import Mapping

Params = Mapping[str, str]
"""Field of RequestInput -> its name in the request (`requests.naming`)."""

CHAT: Params = {
    "chat": "messages",
    "chat.messages": "messages",
    "chat.documents": "documents",
    "chat.tools": "tools",
    "chat.template_kwargs": "chat_template_kwargs",
    "chat.continue_final_message": "continue_final_message",
    "prompt": "messages",
    "prompt_ids": "messages",
    "logprobs": "top_logprobs",
    "include_stop": "include_stop_str_in_output",
}
RESPONSE: Params = {
    **CHAT,
    **dict.fromkeys(("chat", "chat.messages", "prompt", "prompt_ids", "messages"), "input"),
    "max_tokens": "max_output_tokens",
}
COMPLETION: Params = {
    "prompt.text": "prompt",
    "prompt_ids": "prompt",
    "text": "prompt",
    "include_stop": "include_stop_str_in_output",
}
DETOKENIZE: Params = {"token_ids": "tokens", "prompt_ids": "tokens"}
