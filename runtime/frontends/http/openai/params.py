"""How the service's fields are called in requests, so that errors name what the client wrote."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from trtc.protos.errors import TrtcError

Params = Mapping[str, str]
"""Path of a field of the service -> its name in the request. The longest beginning counts."""

CHAT: Params = {
    "chat": "messages",
    "chat.messages": "messages",
    "chat.documents": "documents",
    "chat.template_kwargs": "chat_template_kwargs",
    "chat.continue_final_message": "continue_final_message",
    "prompt": "messages",
    "prompt_ids": "messages",
    "logprobs": "top_logprobs",
    "include_stop": "include_stop_str_in_output",
}
COMPLETION: Params = {
    "prompt.text": "prompt",
    "prompt_ids": "prompt",
    "text": "prompt",
    "include_stop": "include_stop_str_in_output",
}


@contextmanager
def named(params: Params) -> Iterator[None]:
    """Errors of the block name fields of the request."""
    try:
        yield
    except TrtcError as error:
        error.field = _param(error.field, params)
        raise


def _param(field: str, params: Params) -> str:
    field = field.partition(" ")[0]  # of `stop (how many)`
    own = max((one for one in params if _begins(field, one)), key=len, default=None)
    return field if own is None else params[own] + field[len(own) :]


def _begins(field: str, path: str) -> bool:
    return field.startswith(path) and field[len(path) : len(path) + 1] in ("", ".", "[")
