"""The grammar of an answer that has to call tools, or to call them well: a structural tag.

    [thought] calls                     where a call is required
    [thought] (text call)* text         where it may call, and a call has to have its shape
    [thought] (calls | text)            the same, where text has a head of its own
    [thought] (calls | document)        beside a response format
    [thought] document                  without tools

Marks are those of the model's format. A mark that is a special token is named by its id, because
texts of grammars are never special tokens.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from trtc.protos.answer_formats import AnswerFormat, CallFormat, ParameterFormat, quote_of
from trtc.protos.errors import InvalidRequestError
from trtc.runtime.grammar.elements import Element, const, either, optional, sequence
from trtc.runtime.grammar.literal_schema import LiteralSchema, Unheld
from trtc.runtime.grammar.parameter_schema import arguments_of
from trtc.runtime.requests.grammar import Grammar
from trtc.runtime.requests.tools import Tool, ToolUse
from trtc.runtime.text.chat import parse_json

_ANY_OBJECT = {"type": "object"}


class AnswerGrammars:
    """Of one format and tokenizer."""

    def __init__(
        self,
        form: AnswerFormat,
        special_ids: Mapping[str, int],
        end_ids: Collection[int] = (),
    ) -> None:
        """
        Args:
            special_ids: of special tokens, by their texts.
            end_ids: tokens that end an answer, which no grammar has: it only says where.
        """
        self._form = form
        self._end_texts = {text for text, token in special_ids.items() if token in end_ids}
        self._special_ids = special_ids
        texts = sorted(special_ids, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, texts))) if texts else None

    def of_calls(self, use: ToolUse, *, tight: bool, document: Grammar | None = None) -> Element:
        """What an answer is made of that may, or has to, call tools.

        Args:
            tight: arguments are what the tool's schema describes, of tools that are not strict
                too; otherwise theirs are any object.
            document: what the answer is instead of calls; None: free text.

        Raises:
            InvalidRequestError: arguments cannot be held to a schema in this notation.
        """
        call = self._form.call
        assert call is not None
        opens, closes = _section(call)
        can_repeat = use.parallel and not self._end_texts.intersection(call.tails[-1:])
        # Of a gap and a text that begins with one, the text would be read: calls end with theirs.
        last = [call.gap] if opens else []
        tags = [self._tag([*self._call(call, one, tight=tight), *last]) for one in use.callable]
        if opens:
            separator = "" if call.gap else call.between
            tags = [self._tag([opens, _listed(tags, separator, can_repeat=can_repeat), closes])]
        calls = tags[0] if opens else _listed(tags, call.between, can_repeat=can_repeat)
        if use.choice.mode == "required":
            return calls
        if document is not None or self._form.text_head:
            text = {"type": "any_text"} if document is None else element_of(document)
            return either(calls, self.as_text(text))
        stops = bool(opens) or not can_repeat
        begins = [tag["begin"] for tag in tags]
        if isinstance(begins[0], str):
            return {
                "type": "triggered_tags",
                "triggers": [opens or (call.begins_later or call.begins)[0]],
                "tags": tags,
                "stop_after_first": stops,
            }
        return {
            "type": "token_triggered_tags",
            "trigger_tokens": sorted({begin["token"] for begin in begins}),
            "tags": tags,
            "stop_after_first": stops,
        }

    def as_text(self, element: Element) -> Element:
        """What stands where an answer's text does."""
        head = self._elements([self._form.text_head])
        return sequence(*head, element) if head else element

    def after_thought(self, answer: Element, *, has_begun: bool) -> Element:
        """An answer with a thought before it. Args: has_begun: whether the prompt ends within the
        thought; otherwise the answer may do without it."""
        thought = self._form.thought
        assert thought is not None
        (end,) = self._elements([thought.end])
        ending = end["value"] if end["type"] == "const_string" else end
        free = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": ending}
        spaces = {"type": "regex", "pattern": "\\n{0,2}"}
        rest = [free, *(self._elements([thought.then]) or [spaces])]
        if has_begun:
            return sequence(*rest, answer)
        whole = sequence(*self._elements([thought.begins[0]]), *rest)
        return sequence(optional(whole), answer)

    # Calls

    def _call(self, call: CallFormat, tool: Tool, *, tight: bool) -> list[str | Element]:
        """The texts and elements of one call."""
        schema = _schema(tool) if tight or tool.strict else _ANY_OBJECT
        arguments = {"type": "json_schema", "json_schema": schema}
        begin = call.begins[0]
        if call.notation == "parameters":
            gap = call.gap if call.head else ""
            head = f"{begin}{gap}{call.head}{tool.name}{call.name_end}{call.gap}"
            return [head, *self._parameters(call, tool, schema), call.gap.join(call.tails)]
        if call.notation == "literal":
            return [begin + tool.name, self._literal(tool, schema), "".join(call.tails)]
        if call.notation == "named" or call.header_end:
            number = [{"type": "regex", "pattern": ":[0-9]{1,3}"}] if call.numbered else []
            head = begin + call.name_prefix + tool.name
            listed = [f"\n{one}" if one == "```" else one for one in call.tails]
            tails = "".join(one for one in listed if one not in self._end_texts)
            between = call.header + call.name_end + call.header_end
            return [head, *number, between, arguments, tails]
        named = f'{{"name": {json.dumps(tool.name)}, {json.dumps(call.arguments_key)}: '
        if call.notation == "objects":
            return [named, arguments, "}"]
        begin = "" if call.keeps_begin else begin
        tails = "".join(call.gap + one for one in call.tails)
        return [begin + call.gap + named, arguments, "}" + tails]

    def _literal(self, tool: Tool, schema: Mapping[str, Any]) -> Element:
        (quote,) = self._elements([quote_of("literal")])
        try:
            return LiteralSchema(schema, quote).arguments()
        except Unheld as error:
            raise _unheld(error, tool) from error

    def _parameters(self, call: CallFormat, tool: Tool, schema: Mapping[str, Any]) -> list[Element]:
        """Each argument of a schema, in its order; those that are not required may be missing."""
        form = call.parameter
        assert form is not None
        frame = "\n" if call.head else ""
        try:
            arguments = arguments_of(schema, form, is_framed=bool(frame))
        except Unheld as error:
            raise _unheld(error, tool) from error
        if arguments is None:
            return [{"type": "star", "content": self._any_parameter(call, form)}]
        elements = []
        for one in arguments:
            is_text = one.schema is None
            mark = next((m for m, text in form.value_begins if text in (None, is_text)), "")
            begin = f"{form.begin}{one.key}{form.key_end}{_value_gap(call)}{mark}{frame}"
            if one.schema is not None or one.texts is not None:
                content = (
                    {"type": "json_schema", "json_schema": one.schema}
                    if one.texts is None
                    else _one_of(one.texts)
                )
                parts = [content, *self._elements([frame + form.end + call.gap])]
            else:
                parts = self._text_until(frame + form.end, call.gap, one.max_chars)
            argument = sequence(*self._elements([begin]), *parts)
            elements.append(argument if one.is_required else optional(argument))
        return elements

    def _any_parameter(self, call: CallFormat, form: ParameterFormat) -> Element:
        """An argument of any name and value."""
        marks = [sequence(*self._elements([mark])) for mark, _ in form.value_begins]
        return sequence(
            *self._elements([form.begin]),
            {"type": "regex", "pattern": "[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}"},
            *self._elements([form.key_end + _value_gap(call)]),
            *([either(*marks)] if marks else []),
            *self._text_until(form.end, call.gap, None),
        )

    def _text_until(self, end: str, gap: str, max_chars: int | None) -> list[Element]:
        """A text, its end, and the gap behind it. Line breaks before an end that is a special token
        are the text's own: its reader drops one."""
        last = self._elements([end])[-1]
        ending = last["value"] if last["type"] == "const_string" else last
        text: Element = {"type": "any_text"}
        if max_chars is not None:
            text["max_chars"] = max_chars
        return [{"type": "tag", "begin": "", "content": text, "end": ending}, *_const(gap)]

    # Texts and special tokens

    def _tag(self, parts: Sequence[str | Element]) -> Element:
        first, *rest = self._elements(parts)
        begin = first["value"] if first["type"] == "const_string" else first
        return {
            "type": "tag",
            "begin": begin,
            "content": sequence(*rest),
            "end": "",
        }

    def _elements(self, parts: Sequence[str | Element]) -> list[Element]:
        """Parts with their texts as elements: special tokens, and what is between them."""
        elements: list[Element] = []
        for part in parts:
            if not isinstance(part, str):
                elements.append(part)
                continue
            at = 0
            for match in self._special.finditer(part) if self._special else ():
                elements += _const(part[at : match.start()])
                elements.append({"type": "token", "token": self._special_ids[match.group()]})
                at = match.end()
            elements += _const(part[at:])
        return elements


def _unheld(error: Unheld, tool: Tool) -> InvalidRequestError:
    return InvalidRequestError(
        f"has {error.keyword!r} in the schema of {tool.name}, which cannot be held in the "
        "notation of this model's calls",
        field="chat.tools",
        remedy="docs/tools.md lists what can be held",
    )


def _value_gap(call: CallFormat) -> str:
    """Whitespace between a key and its value."""
    return "" if call.head or call.opens else call.gap


def tag_of(element: Element, sent_as: str) -> Grammar:
    """The grammar of an element."""
    return Grammar("structural_tag", json.dumps({"format": element}), sent_as)


def element_of(grammar: Grammar) -> Element:
    """A grammar as part of another.

    Raises:
        InvalidRequestError: it is one of the engine's, or a structural tag in its legacy form; or
            its text is not JSON where it has to be.
    """
    if grammar.kind == "json_schema":
        return {"type": "json_schema", "json_schema": _loaded(grammar)}
    if grammar.kind == "json_object":
        return {"type": "json_schema", "json_schema": _ANY_OBJECT}
    if grammar.kind == "regex":
        return {"type": "regex", "pattern": grammar.text}
    if grammar.kind == "choice":
        return _one_of(_loaded(grammar))
    if grammar.kind == "lark":
        return {"type": "grammar", "grammar": grammar.text}
    given = _loaded(grammar) if grammar.kind == "structural_tag" else None
    format = given.get("format") if isinstance(given, dict) else None
    if not isinstance(format, dict):
        raise InvalidRequestError(
            "cannot stand after a thought, with which this answer begins",
            field=grammar.field,
            remedy="Give a grammar of another kind, or turn thoughts off",
        )
    return format


def _loaded(grammar: Grammar) -> Any:
    return parse_json(grammar.text, grammar.field, list if grammar.kind == "choice" else dict)


def _section(call: CallFormat) -> tuple[str, str]:
    """What stands around all calls; "": nothing does."""
    if call.opens:
        return call.opens + call.gap, call.closes
    if call.notation == "objects" and not call.header_end:
        return f"{call.begins[0]}[", "]" + "".join(call.tails)
    return "", ""


def _listed(tags: list[Element], separator: str, *, can_repeat: bool) -> Element:
    """At least one of the tags."""
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": not can_repeat,
    }


def _one_of(texts: Sequence[Any]) -> Element:
    return either(*(const(str(one)) for one in texts))


def _const(text: str) -> list[Element]:
    return [const(text)] if text else []


def _schema(tool: Tool) -> dict[str, Any]:
    """Of a tool's arguments; one without parameters takes none."""
    if not tool.parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    schema: dict[str, Any] = json.loads(tool.parameters)
    return {"type": "object", **schema}
