"""Turns a request input into a request, for every frontend.

    RequestInput --render--> text --encode--> token ids --defaults--> GenerationRequest

Rendering a chat and tokenising a long text are slow. So an admission is a generator that yields
each such call as `Work` and is sent its result: `run_here` runs the calls in the caller's thread,
the service in its thread pools (runtime/service/prompts.py).
"""

import uuid
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from msgspec.structs import replace

from trtc.protos.errors import ContextLengthError, InvalidRequestError
from trtc.runtime.engine.handle import EngineHandle
from trtc.runtime.requests.grammar import Grammar
from trtc.runtime.requests.principal import LOCAL, Principal
from trtc.runtime.requests.request import GenerationRequest
from trtc.runtime.requests.request_input import RequestInput
from trtc.runtime.requests.token_masks import MaskSource, both_masks
from trtc.runtime.requests.tool_choice import AUTO
from trtc.runtime.requests.validation import check_lengths, finish_input, validate
from trtc.runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from trtc.runtime.requests.tools import ToolUse
    from trtc.runtime.text.chat import Chat

SHORT_TEXT_CHARACTERS = 2048
"""Texts up to this length are tokenised without a check of whether they can fit the context."""

T = TypeVar("T")


class PromptLimits(NamedTuple):
    """Limits of a prompt before it is tokenised. None: no limit."""

    max_bytes: int | None = None
    """UTF-8 bytes of a text, or of all inputs of a chat template."""
    max_messages: int | None = None
    """Messages of a conversation."""


UNLIMITED = PromptLimits()
"""For callers in this process."""


class Origin(NamedTuple):
    """Who sent a request, and its deadline."""

    principal: Principal = LOCAL
    deadline: float | None = None
    """time.monotonic() after which the request ends with DeadlineError; None: no deadline."""
    share_prefixes: bool = False
    """As in `namespace_of`."""


class Work(NamedTuple):
    """A call that may be slow, and can run in any thread."""

    run: Callable[[], Any]
    num_characters: int = 0
    """Characters of the text that it tokenises; 0: it tokenises none."""
    renders: bool = False
    """Whether it waits for the processes that render chat templates."""
    compiles: bool = False
    """Whether it waits for the processes that compile grammars."""


Admission = Generator[Work, Any, T]
"""Yields Work, is sent the result of its `run`, and returns a T."""


def admission(
    engine: EngineHandle,
    request_input: RequestInput,
    origin: Origin,
    limits: PromptLimits = UNLIMITED,
) -> Admission[GenerationRequest]:
    """The request of an input; not yet validated, which `EngineLoop.submit` does.

    Raises:
        InvalidRequestError: the prompt is missing, beyond the limits, or too long for the context
            of the engine or of the principal; or the grammar is not supported.
        NoTokenizerError: the prompt is text, and the engine has no tokenizer.
    """
    has_format = _has_format(request_input)
    tools = _tools(engine, request_input) if has_format else None
    prompt_ids = yield from _prompt_ids(engine, request_input, limits)
    most = origin.principal.limits.max_context
    bounds = engine.loop.bounds
    if most is not None:
        bounds = bounds._replace(max_context=min(most, bounds.max_context))
    request = finish_input(
        request_input,
        request_id=request_input.request_id or uuid.uuid4().hex,
        prompt_ids=prompt_ids,
        deadline=origin.deadline,
        bounds=bounds,
        principal=origin.principal,
        share_prefixes=origin.share_prefixes,
    )
    if most is not None:
        check_lengths(request, bounds)
    grammars: Sequence[Grammar] = () if request_input.grammar is None else (request_input.grammar,)
    if has_format:
        request, grammars = _formatted(engine, request_input, tools, request)
    if not grammars:
        return request
    return (yield from _constrained(engine, request, grammars))


def _has_format(request_input: RequestInput) -> bool:
    """Whether the input needs the format of the model's answers. Completions do not, and importing
    its modules takes a tenth of the time from process start to the first token."""
    return (
        request_input.chat is not None
        or request_input.splits_answer
        or request_input.thinking_token_budget is not None
        or request_input.tool_choice != AUTO
    )


def _tools(engine: EngineHandle, request_input: RequestInput) -> "ToolUse | None":
    from trtc.runtime.engine.answers import check_answer
    from trtc.runtime.requests.tools import tool_use

    tools = tool_use(
        request_input.chat, request_input.tool_choice, parallel=request_input.parallel_tool_calls
    )
    check_answer(engine, request_input, tools)
    return tools


def _formatted(
    engine: EngineHandle,
    request_input: RequestInput,
    tools: "ToolUse | None",
    request: GenerationRequest,
) -> tuple[GenerationRequest, Sequence[Grammar]]:
    """The request with the plan that parses its answer, and its grammars."""
    from trtc.runtime.engine.answers import answer_grammars, answer_plan, thought_budget

    plan = answer_plan(engine, request_input, tools, request.prompt_ids)
    request = replace(request, answer=plan, masks=thought_budget(engine, request_input, plan))
    return request, answer_grammars(engine, request_input, tools, plan)


def chat_ids(engine: EngineHandle, chat: "Chat", limits: PromptLimits) -> Admission[Sequence[int]]:
    """Token ids of a conversation in the engine's chat template."""
    tokenizer = engine.tokenizer_for("chat")
    if limits.max_messages is not None and len(chat.messages) > limits.max_messages:
        raise InvalidRequestError(
            f"has {len(chat.messages)} messages",
            field="chat.messages",
            remedy=f"The server takes at most {limits.max_messages}",
        )
    _check_bytes(chat.num_bytes, "chat", limits)

    def render() -> str:
        from trtc.runtime.requests.tools import tool_use

        tool_use(chat)  # raises for tools of another shape
        return tokenizer.apply_chat_template(chat.template_input())

    text = yield Work(render, renders=True)
    # The template has already written the special tokens.
    ids: Sequence[int] = yield _encoding(engine, tokenizer, text, special=False, field="chat")
    return ids


def text_ids(
    engine: EngineHandle,
    text: str,
    limits: PromptLimits,
    *,
    add_special_tokens: bool = True,
    field: str = "prompt.text",
) -> Admission[Sequence[int]]:
    """Token ids of a text; `field` is its field of the request."""
    tokenizer = engine.tokenizer_for(field)
    _check_bytes(len(text.encode(errors="surrogatepass")), field, limits)
    ids: Sequence[int] = yield _encoding(
        engine, tokenizer, text, special=add_special_tokens, field=field
    )
    return ids


def run_here(admission: Admission[T]) -> T:
    """Run an admission with all of its work in this thread; returns its result."""
    result: Any = None
    while True:
        try:
            work = admission.send(result)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]
        result = work.run()


def _constrained(
    engine: EngineHandle, request: GenerationRequest, choices: Sequence[Grammar]
) -> Admission[GenerationRequest]:
    """The request with the masks of the first grammar that can be compiled."""
    grammar = choices[0]
    validate(request, engine.loop.bounds)  # before the compilation, which is expensive
    if request.min_tokens:
        raise InvalidRequestError(
            f"is given beside {grammar.field}, which says where an output ends",
            field="min_tokens",
            remedy="Leave it out",
        )
    grammars = engine.grammars
    grammars.check(grammar)

    def compiled() -> MaskSource:
        for one in choices[:-1]:
            with suppress(InvalidRequestError):
                return grammars.masks(one, request.n)
        return grammars.masks(choices[-1], request.n)

    masks: MaskSource = yield Work(compiled, compiles=not grammars.is_kept(grammar))
    return replace(request, masks=both_masks(request.masks, masks))


def _prompt_ids(
    engine: EngineHandle, request_input: RequestInput, limits: PromptLimits
) -> Admission[Sequence[int]]:
    """Token ids of the prompt, not yet validated."""
    if request_input.token_ids is not None:
        return request_input.token_ids
    if request_input.chat is not None:
        from trtc.runtime.requests.tools import shown

        return (
            yield from chat_ids(
                engine, shown(request_input.chat, request_input.tool_choice), limits
            )
        )
    if request_input.text is not None:
        return (yield from text_ids(engine, request_input.text, limits))
    raise InvalidRequestError("is missing", field="prompt", remedy="Give text, token_ids or chat")


def _encoding(
    engine: EngineHandle, tokenizer: Tokenizer, text: str, *, special: bool, field: str
) -> Work:
    def encode() -> Sequence[int]:
        if len(text) > SHORT_TEXT_CHARACTERS:
            _check_fit(tokenizer, text, engine.loop.bounds.max_context, field)
        return tokenizer.encode(text, special)

    return Work(encode, num_characters=len(text))


def _check_bytes(size: int, field: str, limits: PromptLimits) -> None:
    if limits.max_bytes is not None and size > limits.max_bytes:
        raise InvalidRequestError(
            f"has {size} bytes",
            field=field,
            remedy=f"The server takes at most {limits.max_bytes}",
        )


def _check_fit(tokenizer: Tokenizer, text: str, max_context: int, field: str) -> None:
    """Refuse a text that has too many tokens even if each is the longest of the vocabulary.

    Normalisers that shorten a text are ignored: the text counts as sent.
    """
    limit = max_context * tokenizer.longest_token
    size = len(text.encode(errors="surrogatepass"))
    if size > limit:
        raise ContextLengthError(
            f"has {size} bytes, more than {max_context} tokens can have; this model's maximum "
            f"context length is {max_context} tokens, prompt and completion together",
            field=field,
            remedy="Shorten it",
        )
