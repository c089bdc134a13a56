"""Structural tags: output that is free text in some places and has a shape in others.

They are a tree of formats, as xgrammar and vLLM word it: a chunk of text, or chunks in order. The
legacy form, `structures` and `triggers`, is one `triggered_tags`.
"""

from typing import Annotated, Literal

import msgspec

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]
_Some = Annotated[str, msgspec.Meta(min_length=1)]


class _Format(
    msgspec.Struct, kw_only=True, frozen=True, tag_field="type", forbid_unknown_fields=True
):
    """A chunk of the output. A field that is there and not known is refused by its name."""


class ConstString(_Format, frozen=True, tag="const_string"):
    value: str


class JsonSchema(_Format, frozen=True, tag="json_schema"):
    json_schema: msgspec.Raw
    style: Literal["json"] = "json"
    any_order: Literal[False] = False
    max_whitespace_cnt: None = None


class GrammarText(_Format, frozen=True, tag="grammar"):
    """In Lark's or GBNF's notation."""

    grammar: str


class Regex(_Format, frozen=True, tag="regex"):
    """In the syntax of Rust's `regex`."""

    pattern: str


class AnyText(_Format, frozen=True, tag="any_text"):
    """Any text without `excludes`, up to what ends it: the end of its tag, or of the output."""

    excludes: list[_Some] = []
    max_chars: _Count | None = None
    max_tokens: None = None


class Token(_Format, frozen=True, tag="token"):
    """One token: its id, or the text of an added token."""

    token: int | str


class ExcludeToken(_Format, frozen=True, tag="exclude_token"):
    """One token that is none of these."""

    exclude_tokens: list[int | str] = []


class AnyTokens(_Format, frozen=True, tag="any_tokens"):
    """Any number of tokens that are none of these, up to the token that ends its tag."""

    exclude_tokens: list[int | str] = []
    max_tokens: _Count | None = None


class Sequence(_Format, frozen=True, tag="sequence"):
    elements: "list[Format]"


class Or(_Format, frozen=True, tag="or"):
    elements: "Annotated[list[Format], msgspec.Meta(min_length=1)]"


class Optional(_Format, frozen=True, tag="optional"):
    content: "Format"


class Plus(_Format, frozen=True, tag="plus"):
    content: "Format"


class Star(_Format, frozen=True, tag="star"):
    content: "Format"


class Repeat(_Format, frozen=True, tag="repeat"):
    """Between `min` and `max` times; -1: any number of times."""

    min: _Count
    max: Annotated[int, msgspec.Meta(ge=-1, le=1 << 20)]
    content: "Format"


class Tag(_Format, frozen=True, tag="tag"):
    """`begin`, then `content`, then `end`. An empty end is that of what is around the tag."""

    begin: str | Token
    content: "Format"
    end: str | list[str] | Token


class TriggeredTags(_Format, frozen=True, tag="triggered_tags"):
    """Any text without `excludes`; what begins with a trigger is one of its tags."""

    triggers: Annotated[list[_Some], msgspec.Meta(min_length=1)]
    tags: Annotated[list[Tag], msgspec.Meta(min_length=1)]
    at_least_one: bool = False
    """It begins with a tag."""
    stop_after_first: bool = False
    """It ends with its first tag."""
    excludes: list[_Some] = []


class TokenTriggeredTags(_Format, frozen=True, tag="token_triggered_tags"):
    """As TriggeredTags, with tokens."""

    trigger_tokens: Annotated[list[int | str], msgspec.Meta(min_length=1)]
    tags: Annotated[list[Tag], msgspec.Meta(min_length=1)]
    exclude_tokens: list[int | str] = []
    at_least_one: bool = False
    stop_after_first: bool = False


class TagsWithSeparator(_Format, frozen=True, tag="tags_with_separator"):
    """Tags and the separator between them, and nothing else."""

    tags: Annotated[list[Tag], msgspec.Meta(min_length=1)]
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


class Dispatch(_Format, frozen=True, tag="dispatch"):
    """Any text without `excludes`; after the text of a rule comes the rule's format."""

    rules: "Annotated[list[tuple[_Some, Format]], msgspec.Meta(min_length=1)]"
    loop: bool = True
    excludes: list[_Some] = []


class TokenDispatch(_Format, frozen=True, tag="token_dispatch"):
    """As Dispatch, with tokens."""

    rules: "Annotated[list[tuple[int | str, Format]], msgspec.Meta(min_length=1)]"
    loop: bool = True
    exclude_tokens: list[int | str] = []


Format = (
    ConstString
    | JsonSchema
    | GrammarText
    | Regex
    | AnyText
    | Token
    | ExcludeToken
    | AnyTokens
    | Sequence
    | Or
    | Optional
    | Plus
    | Star
    | Repeat
    | Tag
    | TriggeredTags
    | TokenTriggeredTags
    | TagsWithSeparator
    | Dispatch
    | TokenDispatch
)


class StructuralTag(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The whole, as `response_format` has it."""

    type: Literal["structural_tag"] = "structural_tag"
    format: Format


class _LegacyStructure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    begin: str
    end: str
    schema: msgspec.Raw
    """A schema, or the text of one."""


class _LegacyTag(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    type: Literal["structural_tag"] = "structural_tag"
    structures: Annotated[list[_LegacyStructure], msgspec.Meta(min_length=1)]
    triggers: Annotated[list[_Some], msgspec.Meta(min_length=1)]


def read_structural_tag(text: str) -> Format:
    """The format of a structural tag: the text of {"format": ...}, or of {"structures": ...,
    "triggers": ...}.

    Raises:
        ValueError: it is no structural tag; the message names the field.
    """
    fields = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    if "structures" in fields:
        return _of_legacy(msgspec.json.decode(text, type=_LegacyTag))
    return msgspec.json.decode(text, type=StructuralTag).format


def _of_legacy(given: _LegacyTag) -> TriggeredTags:
    return TriggeredTags(
        triggers=given.triggers,
        tags=[
            Tag(begin=one.begin, content=JsonSchema(json_schema=_schema(one.schema)), end=one.end)
            for one in given.structures
        ],
    )


def _schema(given: msgspec.Raw) -> msgspec.Raw:
    is_text = bytes(given).startswith(b'"')
    return msgspec.Raw(msgspec.json.decode(given).encode()) if is_text else given
