"""Detects the format in which a model writes reasoning and tool calls, from its chat template."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from trtc.protos.answer_formats import NONE
from trtc.protos.files import UnreadableError, decode_json, read_file

_MAX_BYTES = 16 << 20
_TOOL_TEMPLATE = "tool_use.jinja"
_TEMPLATES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")

_SIGNS: Sequence[tuple[str, tuple[str, ...]]] = (
    ("harmony", ("<|channel|>", "<|message|>")),
    ("gemma", ("<|tool_call>call:",)),
    ("deepseek_v32", ("｜DSML｜",)),
    ("deepseek_v3", ("<｜tool▁call▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁call▁begin｜>",)),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("glm47", ("<arg_key>", "<tool_call>{function-name}<arg_key>")),
    ("glm45", ("<arg_key>",)),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("phi", ("<|/tool_call|>",)),
    ("granite", ("<|tool_call|>",)),
    ("hermes", ("<tool_call>",)),
    ("llama3_json", ("<|python_tag|>",)),
    ("llama3_json", ('{"name": function name, "parameters":',)),
    ("think", ("<think>",)),
)
"""A format, and what its template has in it: the first that has all of it."""


class _Template(msgspec.Struct):
    template: str = ""
    name: str = ""


class _Config(msgspec.Struct):
    chat_template: str | list[_Template] = ""


def detected_format(tokenizer_files: Sequence[Path]) -> str:
    """The name of the format; `none`: the template shows none that is known."""
    files = {path.name: path for path in tokenizer_files}
    text = _of_file(files[_TOOL_TEMPLATE]) if _TOOL_TEMPLATE in files else ""
    text += _template_text(files)
    return next((name for name, signs in _SIGNS if all(one in text for one in signs)), NONE)


def _template_text(files: dict[str, Path]) -> str:
    """All templates of the checkpoint; "": there is none that can be read, which the check of the
    tokenizer reports."""
    for name in _TEMPLATES:
        if name in files and (text := _of_file(files[name])):
            return text
    return ""


def _of_file(path: Path) -> str:
    try:
        content = read_file(path, _MAX_BYTES)
        if path.suffix == ".jinja":
            return content.decode()
        template = decode_json(content, _Config).chat_template
    except (UnreadableError, UnicodeDecodeError):
        return ""
    if isinstance(template, str):
        return template
    return "\n".join(one.template for one in template)
