"""Answers as models write them, in every format."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from trtc.protos.answer_formats import ANSWER_FORMATS
from trtc.runtime.text.answer import is_object, joined
from trtc.runtime.text.answer_parser import AnswerParser
from trtc.runtime.text.answer_plan import tool_types

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
}
TOOLS = {"get_weather": tool_types(WEATHER), "now": tool_types({})}
Said = tuple[str, Any]
"""("text" or "reasoning", what), or (name of a tool, its arguments; their text, if no object)."""


def parser_of(name: str, *, in_thought: bool = False) -> AnswerParser:
    """Of an answer that may call TOOLS."""
    return AnswerParser(ANSWER_FORMATS[name], TOOLS, in_thought=in_thought)


def in_pieces(text: str, sizes: Sequence[int]) -> list[str]:
    """A text cut into pieces of these sizes, by turns."""
    pieces: list[str] = []
    while text:
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(text[:size])
        text = text[size:]
    return pieces


def read_in(name: str, pieces: Sequence[str], *, in_thought: bool = False) -> list[Said]:
    """What an answer says that comes in these pieces."""
    parser = parser_of(name, in_thought=in_thought)
    parts = [part for piece in pieces for part in parser.push(piece)]
    parts += parser.flush()
    said: list[Said] = []
    for part in joined(parts):
        if part.kind == "call":
            assert part.name
            said.append((part.name, json.loads(part.text) if is_object(part.text) else part.text))
        else:
            said.append((part.kind, part.text))
    return said


def in_gemma(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{in_gemma(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(in_gemma, value)) + "]"
    return json.dumps(value)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def written_call(name: str, tool: str, arguments: Mapping[str, Any], number: int = 0) -> str:
    """One call as the templates of a format write it, by hand from its documentation."""
    text = json.dumps(arguments)
    whole = json.dumps({"name": tool, "arguments": arguments})
    each = arguments.items()
    return {
        "hermes": f"<tool_call>\n{whole}\n</tool_call>",
        "llama3_json": json.dumps({"name": tool, "parameters": arguments}),
        "mistral": f"[TOOL_CALLS]{tool}[ARGS]{text}",
        "qwen3_coder": f"<tool_call>\n<function={tool}>\n"
        + "".join(f"<parameter={key}>\n{_plain(one)}\n</parameter>\n" for key, one in each)
        + "</function>\n</tool_call>",
        "harmony": f"<|channel|>commentary to=functions.{tool} <|constrain|>json<|message|>{text}"
        "<|call|>",
        "deepseek_v3": f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{tool}\n```json\n{text}\n```"
        "<｜tool▁call▁end｜>",
        "deepseek_v31": f"<｜tool▁call▁begin｜>{tool}<｜tool▁sep｜>{text}<｜tool▁call▁end｜>",
        "deepseek_v32": f'<｜DSML｜invoke name="{tool}">\n'
        + "".join(
            f'<｜DSML｜parameter name="{key}" string="{json.dumps(isinstance(one, str))}">'
            f"{_plain(one)}</｜DSML｜parameter>\n"
            for key, one in each
        )
        + "</｜DSML｜invoke>",
        "glm45": f"<tool_call>{tool}\n"
        + "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{_plain(one)}</arg_value>\n" for key, one in each
        )
        + "</tool_call>",
        "glm47": f"<tool_call>{tool}"
        + "".join(
            f"<arg_key>{key}</arg_key><arg_value>{_plain(one)}</arg_value>" for key, one in each
        )
        + "</tool_call>",
        "kimi_k2": f"<|tool_call_begin|>functions.{tool}:{number}<|tool_call_argument_begin|>{text}"
        "<|tool_call_end|>",
        "gemma": f"<|tool_call>call:{tool}{in_gemma(dict(arguments))}<tool_call|>",
        "phi": f"<|tool_call|>[{whole}]<|/tool_call|>",
        "granite": f"<|tool_call|>[{whole}]",
    }[name]


def written(name: str, thought: str, text: str, calls: Sequence[tuple[str, Any]]) -> str:
    """An answer as the template of a format shows it."""
    form = ANSWER_FORMATS[name]
    pieces = [written_call(name, *call, at) for at, call in enumerate(calls)]
    opens, closes, between = "", "", ""
    if form.call is not None and calls:
        opens, closes = form.call.opens, form.call.closes
        if opens:
            opens, closes = opens + form.call.gap, form.call.gap + closes
        between = form.call.between
    if name in ("phi", "granite") and len(calls) > 1:
        objects = ", ".join(json.dumps({"name": tool, "arguments": said}) for tool, said in calls)
        pieces = [f"<|tool_call|>[{objects}]" + ("<|/tool_call|>" if name == "phi" else "")]
    body = opens + between.join(pieces) + closes
    if name == "harmony":
        head = f"<|channel|>analysis<|message|>{thought}<|end|>" if thought else ""
        head += "<|start|>assistant" if thought and (text or calls) else ""
        said = f"<|channel|>final<|message|>{text}<|return|>" if text else ""
        if text and calls:
            said = f"<|channel|>commentary<|message|>{text}<|end|><|start|>assistant"
        return head + said + body
    head = ""
    if thought and form.thought is not None:
        head = f"{form.thought.begins[0]}\n{thought}\n{form.thought.end}\n\n"
    return head + text + ("\n" if text and body else "") + body
