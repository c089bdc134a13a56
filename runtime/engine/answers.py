"""How a request's answer is parsed, by the answer format of the engine's model."""

from collections.abc import Sequence

from trtc.protos.answer_formats import ANSWER_FORMATS, AnswerFormat
from trtc.protos.errors import InvalidRequestError
from trtc.runtime.engine.handle import EngineHandle
from trtc.runtime.grammar.answer_grammar import (
    AnswerGrammars,
    element_of,
    tag_of,
)
from trtc.runtime.grammar.elements import Element
from trtc.runtime.requests.grammar import Grammar
from trtc.runtime.requests.request_input import RequestInput
from trtc.runtime.requests.tools import ToolUse
from trtc.runtime.sampling.thought_budget import ThoughtBudget
from trtc.runtime.text.answer_plan import (
    AnswerPlan,
    ends_after_thought,
    ends_in_thought,
    tool_types,
)
from trtc.runtime.text.chat import parse_json

_DOCUMENTS = frozenset({"json_schema", "json_object"})
"""Kinds of grammars that an answer may follow instead of calling tools."""
_TAIL = 64
"""Tokens at the end of a prompt in which the begin marker of a thought is searched."""


def format_of(engine: EngineHandle) -> AnswerFormat:
    """The format in which the engine's model writes reasoning and tool calls."""
    return ANSWER_FORMATS[engine.manifest.format_name]


def check_answer(engine: EngineHandle, request_input: RequestInput, tools: ToolUse | None) -> None:
    """Refuse options that need a model with a known format of tool calls or reasoning.

    Raises:
        InvalidRequestError: names the field.
    """
    form = format_of(engine)
    budget = request_input.thinking_token_budget
    if budget is not None and budget < 0:
        raise InvalidRequestError(
            f"is {budget}", field="thinking_token_budget", remedy="Give 0 or more"
        )
    if tools is not None and request_input.splits_answer and form.call is None:
        raise InvalidRequestError(
            "is not supported by this engine's model",
            field="chat.tools",
            remedy="Leave it out, or build the engine with the --format of its calls",
        )
    is_required = tools is not None and tools.choice.mode == "required"
    can_require = request_input.splits_answer and form.call is not None
    can_end_thoughts = request_input.splits_answer and form.thought is not None
    asked = {
        "tool_choice": is_required and not can_require,
        "parallel_tool_calls": tools is not None and not tools.parallel and not can_require,
        "thinking_token_budget": budget is not None and not can_end_thoughts,
    }
    for field, is_asked in asked.items():
        if is_asked:
            raise InvalidRequestError(
                "is not supported by this engine's model", field=field, remedy="Leave it out"
            )


def answer_grammars(
    engine: EngineHandle,
    request_input: RequestInput,
    tools: ToolUse | None,
    plan: AnswerPlan | None,
) -> Sequence[Grammar]:
    """Grammars of the outputs, of which the first that can be compiled is used; (): free text. A
    thought may come first, or must if the prompt has begun it.

    Raises:
        InvalidRequestError: the input's grammar cannot be combined with its tools or reasoning.
    """
    grammar = request_input.grammar
    if plan is None:
        return () if grammar is None else (grammar,)
    writer = AnswerGrammars(
        plan.form,
        engine.tokenizer_for("chat").special_tokens,
        engine.manifest.model.eos_token_ids,
    )
    found = () if tools is None else _of_calls(writer, plan, tools, grammar)
    if found:
        name = "tool_choice" if tools is None or _is_loose(tools) else "chat.tools"
    elif grammar is None or not (plan.in_thought or plan.may_think or plan.form.text_head):
        return () if grammar is None else (grammar,)
    else:
        try:
            name, found = grammar.field, (writer.as_text(element_of(grammar)),)
        except InvalidRequestError:
            if plan.in_thought:
                raise
            return (grammar,)
    if plan.in_thought or plan.may_think:
        found = tuple(writer.after_thought(one, has_begun=plan.in_thought) for one in found)
    return tuple(tag_of(one, name) for one in found)


def thought_budget(
    engine: EngineHandle, request_input: RequestInput, plan: AnswerPlan | None
) -> ThoughtBudget | None:
    """The masks that enforce the request input's budget of reasoning tokens; None: it has none."""
    if request_input.thinking_token_budget is None or plan is None or plan.form.thought is None:
        return None
    tokenizer = engine.tokenizer_for("chat")
    return ThoughtBudget(
        tokenizer,
        plan.form.thought,
        request_input.thinking_token_budget,
        vocab_size=engine.manifest.model.vocab_size,
        in_thought=plan.in_thought,
    )


def _of_calls(
    writer: AnswerGrammars, plan: AnswerPlan, tools: ToolUse, grammar: Grammar | None
) -> Sequence[Element]:
    """Elements for answers with calls: with the schemas of all tools, then with those of strict
    tools alone. (): tools do not constrain the answer."""
    is_required = tools.choice.mode == "required"
    document = grammar if grammar is not None and grammar.kind in _DOCUMENTS else None
    is_bound = is_required or not tools.parallel or any(one.strict for one in tools.callable)
    if grammar is not None and document is None:
        if is_bound:
            raise InvalidRequestError(
                f"is given beside {grammar.field}",
                field="tool_choice",
                remedy="Give a JSON schema, or auto and tools that are not strict",
            )
        return ()
    if plan.form.call is None or not (is_bound or document is not None):
        return ()
    if not _is_loose(tools):
        return (writer.of_calls(tools, tight=True, document=document),)
    loose = writer.of_calls(tools, tight=False, document=document)
    try:
        return (writer.of_calls(tools, tight=True, document=document), loose)
    except InvalidRequestError:
        return (loose,)


def _is_loose(tools: ToolUse) -> bool:
    """Whether a tool's schema may be ignored."""
    return not all(one.strict for one in tools.callable)


def answer_plan(
    engine: EngineHandle,
    request_input: RequestInput,
    tools: ToolUse | None,
    prompt_ids: Sequence[int],
) -> AnswerPlan | None:
    """How the request input's outputs are split; None: they are text."""
    form = format_of(engine)
    if not request_input.splits_answer or (form.call is None and form.thought is None):
        return None
    tokenizer = engine.tokenizer_for("chat")
    tail = tokenizer.decode(prompt_ids[-_TAIL:], skip_special=False)
    in_thought = ends_in_thought(form, tail)
    return AnswerPlan(
        form=form,
        tools={
            one.name: tool_types(parse_json(one.parameters or "{}", "chat.tools", dict))
            for one in (() if tools is None else tools.callable)
        },
        in_thought=in_thought,
        may_think=(
            form.thought is not None
            and not in_thought
            and not ends_after_thought(form, tail)
            and tokenizer.template_has(form.thought.end)
        ),
        shown_ids=tokenizer.special_within(form.markers),
    )
