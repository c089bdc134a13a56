"""Every route of the HTTP port that takes a body: one that it answers, and how it words errors."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.support.http1 import Answer, post

USER = {"role": "user", "content": "a"}


@dataclass(frozen=True)
class Posted:
    document: Mapping[str, Any]
    """A request that is answered, with four tokens at most where it generates."""
    message: Callable[[Answer], str]
    """What an error says, behind a check of its shape."""
    status: int = 400
    """Of a request that is wrong."""
    long: Mapping[str, Any] = field(default_factory=dict)
    """The fields by which it streams 900 tokens; none: it does not stream."""

    def request(self, path: str, **fields: Any) -> bytes:
        return post(path, json.dumps({**self.document, **fields}).encode())


def _openai(answer: Answer) -> str:
    assert answer.document.keys() == {"error"}
    error = answer.error
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["param"] is None or error["param"] in error["message"], error
    return str(error["message"])


def _anthropic(answer: Answer) -> str:
    assert answer.document.keys() == {"type", "error", "request_id"}
    assert answer.error.keys() == {"type", "message"}
    return str(answer.error["message"])


def _plain(answer: Answer) -> str:
    """Ollama's and KServe's."""
    assert answer.document.keys() == {"error"}
    return str(answer.document["error"])


def _tgi(answer: Answer) -> str:
    assert answer.document.keys() == {"error", "error_type"}
    return str(answer.document["error"])


_LONG_OPENAI = {"stream": True, "max_tokens": 900}
_LONG_OLLAMA = {"stream": True, "options": {"num_predict": 900}}
_TENSORS = {"text_input": "a", "max_tokens": 4}
_INPUTS = [
    {"name": "text_input", "datatype": "BYTES", "shape": [1, 1], "data": ["a"]},
    {"name": "max_tokens", "datatype": "INT32", "shape": [1, 1], "data": [4]},
]

ROUTES: Mapping[str, Posted] = {
    "/v1/chat/completions": Posted(
        {"messages": [USER], "max_tokens": 4}, _openai, 400, _LONG_OPENAI
    ),
    "/v1/completions": Posted({"prompt": "a", "max_tokens": 4}, _openai, 400, _LONG_OPENAI),
    "/v1/responses": Posted(
        {"input": "a", "max_output_tokens": 4},
        _openai,
        400,
        {"stream": True, "max_output_tokens": 900},
    ),
    "/tokenize": Posted({"prompt": "a"}, _openai),
    "/detokenize": Posted({"tokens": [5]}, _openai),
    "/v1/messages": Posted({"messages": [USER], "max_tokens": 4}, _anthropic, 400, _LONG_OPENAI),
    "/v1/messages/count_tokens": Posted({"messages": [USER]}, _anthropic),
    "/api/chat": Posted(
        {"messages": [USER], "stream": False, "options": {"num_predict": 4}},
        _plain,
        400,
        _LONG_OLLAMA,
    ),
    "/api/generate": Posted(
        {"prompt": "a", "stream": False, "options": {"num_predict": 4}}, _plain, 400, _LONG_OLLAMA
    ),
    "/api/show": Posted({"model": "echo"}, _plain),
    "/generate": Posted({"inputs": "a", "parameters": {"max_new_tokens": 4}}, _tgi, 422),
    "/generate_stream": Posted(
        {"inputs": "a", "parameters": {"max_new_tokens": 4}},
        _tgi,
        422,
        {"parameters": {"max_new_tokens": 900}},
    ),
    "/": Posted(
        {"inputs": "a", "parameters": {"max_new_tokens": 4}},
        _tgi,
        422,
        {"stream": True, "parameters": {"max_new_tokens": 900}},
    ),
    "/v2/models/echo/infer": Posted({"inputs": _INPUTS}, _plain),
    "/v2/models/echo/generate": Posted(_TENSORS, _plain),
    "/v2/models/echo/generate_stream": Posted(
        _TENSORS, _plain, 400, {"max_tokens": 900, "stream": True}
    ),
}
