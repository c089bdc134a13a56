"""Compiles untrusted grammars inside a limited process; `trial` is the other side."""

import resource
from functools import partial

from llguidance import LLMatcher

from trtc.runtime.grammar.notation import llguidance_grammar, parser_limits
from trtc.runtime.grammar.tag_grammar import TokenIds
from trtc.runtime.host.limited_child import Message, Work, serve

_STACK_BYTES = 1 << 20
"""An eighth of the stack of a server's thread, so that grammars that compile here compile there."""
_MAX_PROBLEM_CHARACTERS = 300
_SAMPLES = {
    "json_schema": '{"properties": {"a": {"type": "string", "pattern": "^a+$"}}}',
    "lark": 'root ::= "a" [0-9]+',
    "choice": '["a"]',
    "structural_tag": '{"format": {"type": "regex", "pattern": "a"}}',
}


def main() -> None:
    for kind, text in _SAMPLES.items():  # what is imported when needed: then no file can be opened
        assert compiled(TokenIds({}, ()), {"kind": kind, "text": text})["status"] == "ok"
    serve(set_up)


def set_up(request: Message) -> tuple[Message, Work]:
    resource.setrlimit(resource.RLIMIT_STACK, (_STACK_BYTES, _STACK_BYTES))
    token_ids = TokenIds(request["token_ids"], tuple(request["end_token_ids"]))
    return {"status": "ok"}, partial(compiled, token_ids)


def compiled(token_ids: TokenIds, request: Message) -> Message:
    """The result of a trial compilation, with the grammar in llguidance's format."""
    try:
        grammar = llguidance_grammar(request["kind"], request["text"], token_ids)
    except (ValueError, KeyError, RecursionError, TypeError, AttributeError, IndexError) as error:
        return _refused(str(error) or type(error).__name__)
    is_error, said = LLMatcher.validate_grammar_with_warnings(grammar, limits=parser_limits())
    if is_error:
        return _refused(said[0])
    return {"status": "ok", "grammar": grammar}


def _refused(problem: str) -> Message:
    """The error in one line of bounded length, because it may contain the client's text."""
    line = " ".join(problem[: 4 * _MAX_PROBLEM_CHARACTERS].split())
    return {"status": "refused", "problem": line[:_MAX_PROBLEM_CHARACTERS]}
