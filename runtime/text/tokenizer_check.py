"""Tests a tokenizer.json inside a limited process: it may crash, hang or exhaust memory."""

from tokenizers import Tokenizer

from trtc.protos.files import UnreadableError, check_unique_keys
from trtc.protos.panics import one_line
from trtc.runtime.host.limited_child import Message, Work, serve

_REPEATED = (
    "a",
    "A",
    " ",
    "\n",
    "0",
    "ab",
    "a ",
    "\t ",
    "'s",
    "a1",
    "!",
    "é",
    "中",
    "👍",
    "\u0301",
)
"""Runs of these make regular expressions of pre-tokenizers backtrack."""
_LENGTH = 4096
_MAX_TOKEN_ID = 2**31 - 1


def main() -> None:
    serve(set_up)


def set_up(request: Message) -> tuple[Message, Work]:
    """Load `tokenizer`, the text of the file, and use it; the answer has the "problem", or none."""
    answer = {"status": "ok", "problem": _problem(request["tokenizer"])}
    return answer, lambda _: answer


def _problem(content: str) -> str:
    try:
        check_unique_keys(content.encode())
        tokenizer = Tokenizer.from_str(content)
        largest = max(tokenizer.get_vocab().values(), default=-1)
        if not 0 <= largest <= _MAX_TOKEN_ID:
            return f"has {largest} as its largest token id"
        for text in _texts():
            ids = tokenizer.encode(text).ids
            tokenizer.decode(ids)
        tokenizer.decode([0, largest])
    except UnreadableError as error:
        return str(error)
    except MemoryError:
        raise
    except BaseException as error:  # noqa: BLE001 (a panic is no Exception)
        return f"does not work ({one_line(error)})"
    return ""


def _texts() -> list[str]:
    runs = [(part * _LENGTH)[:_LENGTH] for part in _REPEATED]
    return ["", "Hello, world", "".join(_REPEATED), *runs, *(run + "!b" for run in runs)]
