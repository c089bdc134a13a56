"""The llguidance grammar of each kind, and the limits within which one is compiled."""

import json
from typing import Any

from llguidance import LLMatcher, LLParserLimits
from llguidance.gbnf_to_lark import any_to_lark

_ANY_OBJECT = '{"type": "object"}'
_JSON_OPTIONS: Any = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,40}"}
"""Between the parts of a document: enough for indentation, and never endless."""
_STRICT: Any = {"lenient": False}
"""A schema cannot ask that its own keywords are ignored."""


def parser_limits() -> LLParserLimits:
    """Of the work on one grammar, and of that on one mask.

    A mask takes some ten milliseconds at most, and the states of a sequence some ten MiB.
    """
    return LLParserLimits(
        max_lexer_states=20_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        verbose_errors=False,
    )


def llguidance_grammar(kind: str, text: str) -> str:
    """The grammar in llguidance's own words. Whether it is valid is found when it is compiled.

    Raises:
        ValueError: the text is not of the kind.
    """
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if kind == "choice":
        choices = " | ".join(json.dumps(one, ensure_ascii=False) for one in json.loads(text))
        return LLMatcher.grammar_from_lark(f"start: {choices}")
    if kind == "lark":
        return LLMatcher.grammar_from_lark(any_to_lark(text))
    schema = _ANY_OBJECT if kind == "json_object" else text
    if not isinstance(json.loads(schema), dict):
        raise ValueError("a schema is a JSON object")
    return LLMatcher.grammar_from_json_schema(schema, defaults=_JSON_OPTIONS, overrides=_STRICT)
