"""The llguidance grammar of each kind, and the limits within which one is compiled."""

import json
from typing import Any

from llguidance import LLMatcher, LLParserLimits
from llguidance.gbnf_to_lark import any_to_lark

from trtc.runtime.grammar.structural_tag import read_structural_tag
from trtc.runtime.grammar.tag_grammar import TokenIds, tag_grammar

_ANY_OBJECT = '{"type": "object"}'
_JSON_OPTIONS: Any = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,40}"}
"""Whitespace between the parts of a document: enough for indentation, and bounded."""
_STRICT: Any = {"lenient": False}
"""Overrides `lenient` in a schema, by which unsupported keywords would be ignored."""


def parser_limits() -> LLParserLimits:
    """Limits of the work for one grammar and for one mask.

    A mask takes some ten milliseconds at most, and the states of a sequence some ten MiB.
    """
    return LLParserLimits(
        max_lexer_states=20_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        verbose_errors=False,
    )


def llguidance_grammar(kind: str, text: str, token_ids: TokenIds | None = None) -> str:
    """The grammar in llguidance's format; it is validated when it is compiled.

    Args:
        token_ids: tokens that a structural tag may use.

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
    if kind == "structural_tag":
        given = token_ids or TokenIds({}, ())
        return tag_grammar(read_structural_tag(text), given, _embedded_schema, any_to_lark)
    return _schema_grammar(_ANY_OBJECT if kind == "json_object" else text)


def _schema_grammar(schema: str) -> str:
    if not isinstance(json.loads(schema), dict):
        raise ValueError("a schema is a JSON object")
    return LLMatcher.grammar_from_json_schema(schema, defaults=_JSON_OPTIONS, overrides=_STRICT)


def _embedded_schema(schema: str) -> dict[str, Any]:
    """A schema with the options that stand in it, as part of a grammar; `true` is any document."""
    whole = json.loads(_schema_grammar("{}" if schema == "true" else schema))
    (part,) = whole["grammars"]
    return dict(part["json_schema"])
