"""Fields of structured outputs, by OpenAI's and vLLM's names."""

from collections.abc import Mapping
from typing import Any

import msgspec

from trtc.protos.errors import InvalidRequestError
from trtc.runtime.frontends.http.sampling import SamplingFields
from trtc.runtime.requests.grammar import Grammar, choice, only_one

_ABSENT = msgspec.Raw(b"null")


class StructuredOutputs(msgspec.Struct, kw_only=True):
    """vLLM's `structured_outputs`. None: not given."""

    choice: list[str] | None = None
    grammar: str | None = None
    json: msgspec.Raw = _ABSENT
    json_object: bool | None = None
    regex: str | None = None
    structural_tag: msgspec.Raw = _ABSENT
    named: str | None = None
    """Not vLLM's: the name of a grammar of the engine."""


class JsonSchema(msgspec.Struct, kw_only=True):
    """`json_schema` of a response format; the server ignores its name and description."""

    schema: msgspec.Raw = _ABSENT


class ResponseFormat(msgspec.Struct, kw_only=True):
    """`response_format` of OpenAI's chat completions and vLLM's completions. A structural tag is
    `format`, or in its legacy form `structures` and `triggers`."""

    type: str
    json_schema: JsonSchema | None = None
    format: msgspec.Raw = _ABSENT
    structures: msgspec.Raw = _ABSENT
    triggers: msgspec.Raw = _ABSENT

    def structural_tag(self) -> bytes:
        """The given fields of a structural tag, as JSON."""
        fields = {"format": self.format, "structures": self.structures, "triggers": self.triggers}
        return msgspec.json.encode({name: raw for name, raw in fields.items() if raw != _ABSENT})


class StructuredFields(SamplingFields, kw_only=True):
    """vLLM's fields, besides those of every dialect. None: not given."""

    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_json: msgspec.Raw = _ABSENT
    guided_regex: str | None = None
    structured_outputs: StructuredOutputs | None = None


def grammar_of(fields: StructuredFields, *others: Grammar | None) -> Grammar | None:
    """The grammar of a request; None: there is none.

    Args:
        others: grammars of its other fields.

    Raises:
        InvalidRequestError: there are several, or one is not supported.
    """
    asked = fields.structured_outputs or StructuredOutputs()
    within = "structured_outputs."
    return only_one(
        [
            *others,
            schema_of(fields.guided_json, "guided_json"),
            _plain("regex", fields.guided_regex, "guided_regex"),
            choice(fields.guided_choice, "guided_choice") if fields.guided_choice else None,
            _plain("lark", fields.guided_grammar, "guided_grammar"),
            schema_of(asked.json, f"{within}json"),
            Grammar("json_object", sent_as=f"{within}json_object") if asked.json_object else None,
            _plain("regex", asked.regex, f"{within}regex"),
            None if asked.choice is None else choice(asked.choice, f"{within}choice"),
            _plain("lark", asked.grammar, f"{within}grammar"),
            _document("structural_tag", asked.structural_tag, f"{within}structural_tag"),
            _plain("named", asked.named, f"{within}named"),
        ]
    )


def response_format(given: ResponseFormat | None) -> Grammar | None:
    """The grammar of `response_format`.

    Raises:
        InvalidRequestError: its type is unknown, or its schema is missing.
    """
    if given is None:
        return None
    if given.type == "structural_tag":
        return Grammar("structural_tag", given.structural_tag().decode(), "response_format")
    schema = _ABSENT if given.json_schema is None else given.json_schema.schema
    return _formatted(given.type, schema, "response_format", "response_format.json_schema.schema")


def text_format(given: Mapping[str, Any] | None, field: str) -> Grammar | None:
    """The grammar of a format with `type` and `schema` side by side: `text.format` of a response in
    OpenAI's API, `output_config.format` of a message in Anthropic's.

    Raises:
        InvalidRequestError: as `response_format`.
    """
    if given is None:
        return None
    if given.get("type") == "structural_tag":
        return Grammar("structural_tag", msgspec.json.encode(given).decode(), field)
    schema = msgspec.Raw(msgspec.json.encode(given.get("schema")))
    return _formatted(str(given.get("type")), schema, field, f"{field}.schema")


def schema_of(raw: msgspec.Raw, sent_as: str) -> Grammar | None:
    """The grammar of a JSON schema, which may also be given as text; None for null."""
    return _document("json_schema", raw, sent_as)


def _document(kind: Any, raw: msgspec.Raw, sent_as: str) -> Grammar | None:
    """The grammar of a JSON document, which may also be given as text; None for null."""
    if bytes(raw) == b"null":
        return None
    value = bytes(raw).decode()
    text = msgspec.json.decode(raw) if value.startswith('"') else value
    return Grammar(kind, text, sent_as)


def _formatted(kind: str, schema: msgspec.Raw, field: str, schema_field: str) -> Grammar | None:
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar("json_object", sent_as=field)
    if kind != "json_schema":
        raise InvalidRequestError(
            f"is {kind[:40]!r}, which this server does not have",
            field=f"{field}.type",
            remedy="Give text, json_object, json_schema or structural_tag",
        )
    grammar = schema_of(schema, schema_field)
    if grammar is None:
        raise InvalidRequestError("is missing", field=schema_field, remedy="Give a JSON schema")
    return grammar


def _plain(kind: Any, text: str | None, sent_as: str) -> Grammar | None:
    return None if text is None else Grammar(kind, text, sent_as)
