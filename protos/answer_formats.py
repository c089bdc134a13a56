"""The formats in which models write reasoning and tool calls: one table.

A model answers in the format of its checkpoint's chat template. `trtc build` detects the format
(builder/answer_format.py), the manifest has its name, and the runtime parses answers by its entry
in this table (runtime/text/answer_parser.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from trtc.protos.errors import RequestError

Notation = Literal["object", "objects", "named", "parameters", "literal"]
"""The content of a call between its begin and its end.

object       {"name": NAME, "arguments": {...}}
objects      such an object, or a list of them; or `named`
named        NAME, then the arguments as a JSON object
parameters   NAME, then each argument between marks of its own
literal      NAME, then the arguments as an object whose keys have no quotes (Gemma)
"""


@dataclass(frozen=True)
class ThoughtFormat:
    """The markers around reasoning."""

    begins: tuple[str, ...]
    end: str
    repeats: bool = False
    """Whether reasoning may begin after text; otherwise only at the beginning of an answer."""
    then: str = ""
    """Text between reasoning and the rest of an answer, as in templates."""


@dataclass(frozen=True)
class ParameterFormat:
    """begin KEY key_end [value_begins] VALUE end"""

    begin: str
    key_end: str
    end: str
    value_begins: tuple[tuple[str, bool | None], ...] = ()
    """What may stand before a value, and whether it says that the value is a text (None: the tool's
    schema says)."""


@dataclass(frozen=True)
class CallFormat:
    """begin [head] CALL [tails]; whitespace between them means nothing."""

    begins: tuple[str, ...]
    notation: Notation
    tails: tuple[str, ...] = ()
    """Texts after the arguments. An answer may end before them."""
    head: str = ""
    """Text between begin and name."""
    name_prefix: str = ""
    """Optional prefix of a name."""
    numbered: bool = False
    """Whether a name may be followed by `:` and the call's number."""
    header: str = ""
    """Text after a name, as in templates."""
    header_end: str = ""
    """Ends whatever stands after a name; "": nothing does."""
    name_end: str = ""
    arguments_key: str = "arguments"
    parameter: ParameterFormat | None = None
    keeps_begin: bool = False
    """Whether `begins` are part of the call itself."""
    begins_later: tuple[str, ...] = ()
    """Begin markers of a call after text; (): the same."""
    separator: str = ""
    """Marker between two calls."""
    gap: str = ""
    """Whitespace between the markers of a call, as in templates."""
    between: str = ""
    """Text between two calls, as in templates."""
    opens: str = ""
    """Text before the first call, if calls are in a section."""
    closes: str = ""
    """Text after the last call, if calls are in a section."""


@dataclass(frozen=True)
class AnswerFormat:
    """The format of a model's answers."""

    name: str
    thought: ThoughtFormat | None = None
    call: CallFormat | None = None
    dropped: tuple[str, ...] = ()
    """Markers that are removed from answers."""
    text_head: str = ""
    """Marker before the text of an answer; one of `dropped`."""
    short_ids: bool = False
    """Whether ids of calls must have nine letters and digits, as the template requires."""

    @property
    def markers(self) -> tuple[str, ...]:
        """All texts that may be, or contain, special tokens of the tokenizer."""
        found = list(self.dropped)
        if self.thought is not None:
            found += [*self.thought.begins, self.thought.end]
        if self.call is not None:
            call = self.call
            found += [*call.begins, *call.tails, call.head, call.name_end, call.header_end]
            found += [call.opens, call.closes, *([_GEMMA_QUOTE] * (call.notation == "literal"))]
            if call.parameter is not None:
                found += [call.parameter.begin, call.parameter.key_end, call.parameter.end]
                found += [mark for mark, _ in call.parameter.value_begins]
        return tuple(mark for mark in found if mark)


NONE = "none"
_GEMMA_QUOTE = '<|"|>'
_THINK = ThoughtFormat(("<think>",), "</think>")


def _harmony() -> AnswerFormat:
    """OpenAI's format of gpt-oss: every message has a channel, and a call has a recipient."""
    heads = ("<|channel|>", "<|start|>assistant<|channel|>")
    recipients = [f"{head}{name}" for head in heads for name in ("commentary", "analysis")]
    return AnswerFormat(
        "harmony",
        thought=ThoughtFormat(
            tuple(f"{head}analysis<|message|>" for head in heads),
            "<|end|>",
            repeats=True,
            then="<|start|>assistant",
        ),
        call=CallFormat(
            begins=(
                *(f"{one} to=functions." for one in recipients),
                "<|start|>assistant to=functions.",
            ),
            notation="named",
            header=" <|constrain|>json",
            header_end="<|message|>",
            tails=("<|call|>",),
            between="<|start|>assistant",
        ),
        text_head="<|channel|>final<|message|>",
        dropped=(
            *(f"{head}{name}<|message|>" for head in heads for name in ("final", "commentary")),
            "<|end|>",
            "<|return|>",
        ),
    )


def _deepseek(name: str, begin: str, name_end: str, *tails: str, between: str) -> AnswerFormat:
    return AnswerFormat(
        name,
        thought=_THINK,
        call=CallFormat(
            begins=(begin,),
            notation="named",
            name_end=name_end,
            tails=(*tails, "<｜tool▁call▁end｜>"),
            between=between,
            opens="<｜tool▁calls▁begin｜>",
            closes="<｜tool▁calls▁end｜>",
        ),
        dropped=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    )


def _glm(name: str, line: str) -> AnswerFormat:
    return AnswerFormat(
        name,
        thought=_THINK,
        call=CallFormat(
            begins=("<tool_call>",),
            notation="parameters",
            parameter=ParameterFormat(
                "<arg_key>", "</arg_key>", "</arg_value>", (("<arg_value>", None),)
            ),
            tails=("</tool_call>",),
            gap=line,
            between="\n",
        ),
    )


_FORMATS = (
    AnswerFormat(NONE),
    AnswerFormat("think", thought=_THINK),
    AnswerFormat(
        "hermes",
        thought=_THINK,
        call=CallFormat(
            begins=("<tool_call>",),
            notation="object",
            tails=("</tool_call>",),
            gap="\n",
            between="\n",
        ),
    ),
    AnswerFormat(
        "llama3_json",
        call=CallFormat(
            begins=("{",),
            notation="object",
            arguments_key="parameters",
            keeps_begin=True,
            begins_later=('{"name"', '{"type"'),
            separator=";",
            between="; ",
        ),
        dropped=("<|python_tag|>",),
    ),
    AnswerFormat(
        "mistral",
        thought=ThoughtFormat(("[THINK]",), "[/THINK]", repeats=True),
        call=CallFormat(begins=("[TOOL_CALLS]",), notation="objects", header_end="[ARGS]"),
        short_ids=True,
    ),
    AnswerFormat(
        "qwen3_coder",
        thought=_THINK,
        call=CallFormat(
            begins=("<tool_call>",),
            notation="parameters",
            head="<function=",
            name_end=">",
            parameter=ParameterFormat("<parameter=", ">", "</parameter>"),
            tails=("</function>", "</tool_call>"),
            gap="\n",
            between="\n",
        ),
    ),
    _harmony(),
    _deepseek(
        "deepseek_v3",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        "\n```json\n",
        "```",
        between="\n",
    ),
    _deepseek("deepseek_v31", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", between=""),
    AnswerFormat(
        "deepseek_v32",
        thought=_THINK,
        call=CallFormat(
            begins=('<｜DSML｜invoke name="',),
            notation="parameters",
            name_end='">',
            parameter=ParameterFormat(
                '<｜DSML｜parameter name="',
                '" string="',
                "</｜DSML｜parameter>",
                (('true">', True), ('false">', False)),
            ),
            tails=("</｜DSML｜invoke>",),
            gap="\n",
            between="\n",
            opens="<｜DSML｜function_calls>",
            closes="</｜DSML｜function_calls>",
        ),
        dropped=("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
    ),
    _glm("glm45", "\n"),
    _glm("glm47", ""),
    AnswerFormat(
        "kimi_k2",
        thought=_THINK,
        call=CallFormat(
            begins=("<|tool_call_begin|>",),
            notation="named",
            name_prefix="functions.",
            numbered=True,
            name_end="<|tool_call_argument_begin|>",
            tails=("<|tool_call_end|>",),
            opens="<|tool_calls_section_begin|>",
            closes="<|tool_calls_section_end|>",
        ),
        dropped=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    AnswerFormat(
        "gemma",
        thought=ThoughtFormat(("<|channel>thought",), "<channel|>", repeats=True),
        call=CallFormat(begins=("<|tool_call>call:",), notation="literal", tails=("<tool_call|>",)),
    ),
    AnswerFormat(
        "phi",
        thought=_THINK,
        call=CallFormat(
            begins=("<|tool_call|>",), notation="objects", tails=("<|/tool_call|>",), between=", "
        ),
    ),
    AnswerFormat(
        "granite",
        thought=_THINK,
        call=CallFormat(begins=("<|tool_call|>", "<tool_call>"), notation="objects", between=", "),
    ),
)
ANSWER_FORMATS: Mapping[str, AnswerFormat] = MappingProxyType({one.name: one for one in _FORMATS})


def answer_format(name: str) -> AnswerFormat:
    """The format called `name`.

    Raises:
        RequestError: there is no such format.
    """
    found = ANSWER_FORMATS.get(name)
    if found is None:
        raise RequestError(
            f"is {name[:40]!r}", field="--format", remedy=f"Use one of {', '.join(ANSWER_FORMATS)}"
        )
    return found


def quote_of(notation: Notation) -> str:
    """What stands at both ends of a text within arguments."""
    return _GEMMA_QUOTE if notation == "literal" else '"'
