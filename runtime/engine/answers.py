"""How a request's answer is read, by the notation of the engine's model."""

from collections.abc import Sequence

from trtc.protos.answer_formats import AnswerFormat, answer_format
from trtc.protos.errors import InvalidRequestError
from trtc.runtime.engine.handle import EngineHandle
from trtc.runtime.requests.draft import RequestDraft
from trtc.runtime.requests.tools import ToolUse
from trtc.runtime.text.answer_plan import AnswerPlan, ends_in_thought, tool_types
from trtc.runtime.text.chat import parse_json

_TAIL = 64
"""Tokens at the end of a prompt, in which the begin of a thought lies."""


def format_of(engine: EngineHandle) -> AnswerFormat:
    """How the engine's model writes thoughts and calls.

    Raises:
        RequestError: this trtc does not know the format.
    """
    return answer_format(engine.manifest.format_name, field="answer_format")


def check_answer(engine: EngineHandle, draft: RequestDraft, tools: ToolUse | None) -> None:
    """Refuse what takes a model whose calls and thoughts are told from its text.

    Raises:
        InvalidRequestError: names the field.
    """
    form = format_of(engine)
    if tools is not None and draft.splits_answer and form.call is None:
        raise InvalidRequestError(
            "is not supported by this engine's model",
            field="chat.tools",
            remedy="Leave it out, or build the engine with the --format of its calls",
        )
    asked = {
        "tool_choice": tools is not None and tools.choice.mode == "required",
        "parallel_tool_calls": tools is not None and not tools.parallel,
        "thinking_token_budget": draft.thinking_token_budget is not None,
    }
    for field, is_asked in asked.items():
        if is_asked:
            raise InvalidRequestError(
                "is not supported by this engine's model", field=field, remedy="Leave it out"
            )


def answer_plan(
    engine: EngineHandle, draft: RequestDraft, tools: ToolUse | None, prompt_ids: Sequence[int]
) -> AnswerPlan | None:
    """How the draft's outputs are split; None: they are text."""
    form = format_of(engine)
    if not draft.splits_answer or (form.call is None and form.thought is None):
        return None
    tokenizer = engine.tokenizer_for("chat")
    return AnswerPlan(
        form=form,
        tools={
            one.name: tool_types(parse_json(one.parameters or "{}", "chat.tools", dict))
            for one in (() if tools is None else tools.callable)
        },
        in_thought=ends_in_thought(form, tokenizer.decode(prompt_ids[-_TAIL:], skip_special=False)),
        shown_ids=tokenizer.special_within(form.markers),
    )
