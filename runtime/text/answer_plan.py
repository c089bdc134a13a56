"""How the outputs of one request are split into text, thoughts and calls."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trtc.protos.answer_formats import AnswerFormat
from trtc.runtime.text.answer_parser import AnswerParser
from trtc.runtime.text.call_reader import ToolTypes


@dataclass(frozen=True)
class AnswerPlan:
    """The plan of one request, which all its sequences share."""

    form: AnswerFormat
    tools: Mapping[str, ToolTypes]
    """Tools that the answer may call, by name; empty: calls are not parsed."""
    in_thought: bool
    """Whether the prompt ends within a thought."""
    may_think: bool
    """Whether the model may begin a thought itself, as its template shows it."""
    shown_ids: frozenset[int]
    """Special tokens that are part of markers, and so are kept in the text."""

    def parser(self) -> AnswerParser:
        """A parser for one sequence."""
        return AnswerParser(self.form, self.tools, in_thought=self.in_thought)


def tool_types(schema: Mapping[str, Any]) -> ToolTypes:
    """The arguments that are texts by a JSON schema."""
    properties = schema.get("properties")
    is_text: dict[str, bool] = {}
    nullable: set[str] = set()
    for name, one in properties.items() if isinstance(properties, dict) else ():
        given = one.get("type") if isinstance(one, dict) else None
        kinds = {given} if isinstance(given, str) else set(given or ())
        if kinds and kinds <= {"string", "null"}:
            is_text[name] = True
            nullable |= {name} if "null" in kinds else set()
        elif kinds and "string" not in kinds:
            is_text[name] = False
    return ToolTypes(is_text, frozenset(nullable))


def ends_in_thought(form: AnswerFormat, prompt_tail: str) -> bool:
    """Whether a prompt with this end has begun the answer's thought."""
    return form.thought is not None and prompt_tail.rstrip().endswith(form.thought.begins)


def ends_after_thought(form: AnswerFormat, prompt_tail: str) -> bool:
    """Whether a prompt that ends so has ended the answer's thought, as those of templates do whose
    thoughts are turned off."""
    return form.thought is not None and prompt_tail.rstrip().endswith(form.thought.end)
