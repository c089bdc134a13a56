"""The grammar of outputs, as a client gives it."""

import json
from collections.abc import Sequence
from typing import Any, Literal, get_args

import msgspec

from trtc.protos.errors import InvalidRequestError
from trtc.protos.grammars import MAX_GRAMMAR_BYTES

Kind = Literal["json_schema", "json_object", "regex", "choice", "lark", "structural_tag", "named"]
KINDS: tuple[str, ...] = get_args(Kind)


class Grammar(msgspec.Struct, frozen=True):
    """Constrains outputs to strings of its language."""

    kind: Kind
    text: str = ""
    """By kind: a JSON schema; nothing; a regular expression in the syntax of Rust's `regex`; a JSON
    list of texts; a grammar in Lark's or GBNF's notation; a structural tag, as in a response format
    of the OpenAI API; the name of a grammar of the engine."""
    sent_as: str = ""
    """The request's field of the grammar, for errors; "": `grammar` and its kind."""

    @property
    def field(self) -> str:
        """The field that errors name."""
        return self.sent_as or f"grammar.{self.kind}"


def json_schema(schema: str | dict[str, Any], sent_as: str = "") -> Grammar:
    """Outputs are JSON documents of a schema, which is given as an object or as its text."""
    text = schema if isinstance(schema, str) else json.dumps(schema)
    return Grammar("json_schema", text, sent_as)


def schema_or_name(text: str, sent_as: str = "") -> Grammar:
    """What a protocol asks for that has room for nothing but a schema: the schema {"named": NAME}
    is a grammar of the engine."""
    try:
        given = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        given = None
    if isinstance(given, dict) and given.keys() == {"named"} and isinstance(given["named"], str):
        return Grammar("named", given["named"], sent_as)
    return Grammar("json_schema", text, sent_as)


def choice(texts: Sequence[str], sent_as: str = "") -> Grammar:
    """Outputs are one of several texts.

    Raises:
        InvalidRequestError: there is none, or one is empty.
    """
    if not texts or not all(texts):
        raise InvalidRequestError(
            "has an empty text" if texts else "has no texts",
            field=sent_as or "grammar.choice",
            remedy="Give at least one text, and none that is empty",
        )
    return Grammar("choice", json.dumps(list(texts)), sent_as)


def only_one(given: Sequence[Grammar | None]) -> Grammar | None:
    """The only grammar of a request, of several fields that may give one; None: there is none.

    Raises:
        InvalidRequestError: there are several.
    """
    named = [one for one in given if one is not None]
    if len(named) > 1:
        raise InvalidRequestError(
            f"is given beside {named[0].field}", field=named[1].field, remedy="Give one of them"
        )
    return named[0] if named else None


def check_size(grammar: Grammar) -> None:
    """Refuse a text of more than MAX_GRAMMAR_BYTES; InvalidRequestError."""
    size = len(grammar.text.encode(errors="surrogatepass"))
    if size > MAX_GRAMMAR_BYTES:
        raise InvalidRequestError(
            f"has {size} bytes", field=grammar.field, remedy=f"Give at most {MAX_GRAMMAR_BYTES}"
        )
