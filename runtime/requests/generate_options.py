"""The keyword arguments of `generate` and `chat`: the same in this process and for both clients."""

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, Protocol, TypeVar, cast, get_args

from msgspec.structs import asdict

from trtc.protos.errors import InvalidRequestError
from trtc.protos.sampling import SAMPLING_PARAMETERS, SamplingOptions
from trtc.runtime.requests.grammar import Grammar, choice, only_one
from trtc.runtime.requests.keywords import Keyword
from trtc.runtime.requests.prompts import Prompt, Prompts, read_prompts
from trtc.runtime.requests.request_input import RequestInput
from trtc.runtime.requests.tool_choice import AUTO, tool_choice
from trtc.runtime.text.template_options import TEMPLATE_OPTIONS, Message, TemplateOptions


class GenerateOptions(SamplingOptions, total=False):
    """Keyword arguments of `generate`, all optional; defaults are those of RequestInput, the model
    and SamplingParams."""

    model: str
    request_id: str
    max_tokens: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    min_tokens: int
    include_stop: bool
    n: int
    logprobs: int | None
    prompt_logprobs: int | None
    priority: int
    cache_salt: str
    json_schema: str | Mapping[str, Any]
    json_object: bool
    regex: str
    choice: Sequence[str]
    grammar: str
    structural_tag: str | Mapping[str, Any]
    grammar_name: str


class ChatOptions(GenerateOptions, TemplateOptions, total=False):
    """Keyword arguments of `chat`."""

    tool_choice: str | Mapping[str, Any]
    parallel_tool_calls: bool
    thinking_token_budget: int | None
    splits_answer: bool


_SAMPLING = frozenset(SamplingOptions.__annotations__)

_DESCRIPTIONS = {
    **{one.name: f"{one.meaning}. None: {one.default_said}." for one in SAMPLING_PARAMETERS},
    "logit_bias": "token id to what is added to its logit; None: nothing.",
    "seed": "equal seeds give equal tokens; None: a new one.",
    "model": "name of the engine; may be empty where there is one.",
    "request_id": "unique among this client's running requests; empty: a new one.",
    "max_tokens": "new tokens a sequence; None: the model's default, or as many as fit.",
    "stop": "texts that end a sequence.",
    "stop_token_ids": "tokens that end a sequence.",
    "ignore_eos": "go on after the model's end-of-sequence tokens.",
    "min_tokens": "new tokens before which only max_tokens ends a sequence.",
    "include_stop": "keep the stop text in the output.",
    "n": "sequences that are drawn for the prompt.",
    "logprobs": "likeliest tokens to report at each place, 0 to 20; None: no log-probabilities.",
    "prompt_logprobs": "the same for the prompt's tokens.",
    "priority": "higher ones are served first, up to what the server grants.",
    "cache_salt": "a secret: clients that give the same one share cached prefixes.",
    "json_schema": "a JSON schema that each output is a document of, or its text.",
    "json_object": "each output is a JSON object.",
    "regex": "a regular expression that each output matches as a whole.",
    "choice": "texts, of which each output is one.",
    "grammar": "a grammar in Lark's or GBNF's notation that each output is a text of.",
    "structural_tag": "free text with parts of given shapes: a mapping of type "
    "`structural_tag`, or its text.",
    "grammar_name": "a grammar that the engine was built with, by its name.",
    "tools": "functions in the shape of the OpenAI API, which the answer may call.",
    "tool_choice": "none, auto, required, a function or allowed_tools, as in the OpenAI API; None: "
    "auto.",
    "parallel_tool_calls": "whether an answer may have several calls.",
    "enable_thinking": "whether the model reasons; None: as its chat template does.",
    "reasoning_effort": "none, minimal, low, medium, high, xhigh or max, for the chat template.",
    "thinking_token_budget": "tokens that the model may reason for; None: no limit.",
    "splits_answer": "whether outputs have parts: text, thoughts, calls of tools; otherwise all is "
    "text, as the model wrote it.",
    "documents": "JSON objects, for the chat template.",
    "chat_template_kwargs": "further variables of the chat template.",
    "add_generation_prompt": "whether the prompt ends with the head of the assistant's message; "
    "None: unless continue_final_message is set.",
    "continue_final_message": "the prompt ends inside the last message, which the model goes on "
    "with.",
}

_DEFAULTS = asdict(RequestInput()) | {
    "continue_final_message": False,
    "json_object": False,
}


def _keywords(options: Any) -> Mapping[str, Keyword]:
    """The entries of a TypedDict; those that neither an input nor a template needs are None."""
    keywords = {}
    for name, annotation in options.__annotations__.items():
        default = _DEFAULTS.get(name)
        annotation = annotation | None if default is None else annotation
        keywords[name] = Keyword(annotation, default, _DESCRIPTIONS[name])
    return keywords


TEMPLATE_KEYWORDS = _keywords(TemplateOptions)
GENERATE_KEYWORDS = _keywords(GenerateOptions)
CHAT_KEYWORDS = _keywords(ChatOptions)


_KINDS: Mapping[Any, tuple[type, str]] = {
    bool: (bool, "True or False"),
    float: (Real, "a number"),
    int: (Integral, "a whole number"),
    str: (str, "a text"),
}


def _kind(annotation: Any) -> tuple[type, str] | None:
    """The type and its description if an option is a plain value; None: a list or a mapping."""
    members = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    plain = [one for one in members if one is not NoneType]
    return _KINDS.get(plain[0]) if len(plain) == 1 else None


_KIND_OF = {name: _kind(annotation) for name, annotation in ChatOptions.__annotations__.items()}
_KIND_OF["logit_bias"] = (Mapping, "a mapping of token ids to numbers")


class Cancellable(Protocol):
    """Any kind of generation."""

    def cancel(self) -> None: ...


GenerationT = TypeVar("GenerationT", bound=Cancellable)


def submit_prompts(
    prompt: Prompt | Prompts,
    options: GenerateOptions,
    submit: Callable[[RequestInput], GenerationT],
) -> GenerationT | list[GenerationT]:
    """Submit one prompt, or several at once: if one is refused, those before it are cancelled.

    Raises:
        InvalidRequestError: the prompt is of another kind, or an id is given for several.
    """
    prompts = read_prompts(prompt)
    if not isinstance(prompts, list):
        return submit(input_of_prompt(prompts, options))
    if options.get("request_id") and len(prompts) > 1:
        raise InvalidRequestError(
            f"is given for {len(prompts)} prompts",
            field="request_id",
            remedy="Leave it out: each generation has its own",
        )
    request_inputs = [input_of_prompt(one, options) for one in prompts]
    started: list[GenerationT] = []
    try:
        for request_input in request_inputs:
            started.append(submit(request_input))
    except BaseException:
        for generation in started:
            generation.cancel()
        raise
    return started


def input_of_prompt(prompt: Prompt, options: GenerateOptions) -> RequestInput:
    """A request input for a text, or for the token ids of one."""
    if isinstance(prompt, str):
        return RequestInput(text=prompt, **_input_fields(options))
    return RequestInput(token_ids=tuple(prompt), **_input_fields(options))


def input_of_chat(messages: Sequence[Message], options: ChatOptions) -> RequestInput:
    """A request input for a conversation, oldest message first.

    Raises:
        InvalidRequestError: a message or a template option has another shape.
    """
    from trtc.runtime.text.chat_options import chat_of  # few programs have conversations

    given: dict[str, Any] = dict(options)
    of_template: dict[str, Any] = {
        name: given.pop(name) for name in list(given) if name in TEMPLATE_OPTIONS
    }
    for name in ("enable_thinking", "reasoning_effort"):
        _check_kind(name, of_template.get(name))
    chat = chat_of(messages, cast(TemplateOptions, of_template))
    choice = tool_choice(given.pop("tool_choice", None)) or AUTO
    return RequestInput(
        chat=chat, tool_choice=choice, **_input_fields(cast(GenerateOptions, given))
    )


def _input_fields(options: GenerateOptions) -> dict[str, Any]:
    """RequestInput's keyword arguments; the client draws the id, so that it can abort by it."""
    given: dict[str, Any] = dict(options)
    for name, value in given.items():
        _check_kind(name, value)
    sampling = {name: given.pop(name) for name in list(given) if name in _SAMPLING}
    sampling = {name: value for name, value in sampling.items() if value is not None}
    stop = given.pop("stop", ())
    given["stop"] = (stop,) if isinstance(stop, str) else _listed("stop", stop, str)
    given["stop_token_ids"] = _listed("stop_token_ids", given.pop("stop_token_ids", ()), int)
    given["grammar"] = _grammar(given)
    given["request_id"] = given.pop("request_id", "") or uuid.uuid4().hex
    return {"sampling": sampling, **given}


def _grammar(given: dict[str, Any]) -> Grammar | None:
    """The grammar of outputs; removes its options from `given`."""
    texts = given.pop("choice", None)
    documents = {name: given.pop(name, None) for name in ("json_schema", "structural_tag")}
    plain = {
        name: given.pop(name, None) for name in ("json_object", "regex", "grammar", "grammar_name")
    }
    return only_one(
        [
            _document("json_schema", documents["json_schema"]),
            Grammar("json_object", sent_as="json_object") if plain["json_object"] else None,
            None if plain["regex"] is None else Grammar("regex", plain["regex"], "regex"),
            None if texts is None else choice(_listed("choice", texts, str), "choice"),
            None if plain["grammar"] is None else Grammar("lark", plain["grammar"], "grammar"),
            _document("structural_tag", documents["structural_tag"]),
            _named(plain["grammar_name"]),
        ]
    )


def _named(name: str | None) -> Grammar | None:
    return None if name is None else Grammar("named", name, "grammar_name")


def _document(name: Literal["json_schema", "structural_tag"], given: Any) -> Grammar | None:
    """The grammar of an option that is a JSON document or its text; None: not given."""
    if given is None:
        return None
    if not isinstance(given, str | Mapping):
        raise _other_kind(given, name, "Give a mapping, or the text of one")
    try:
        return Grammar(name, given if isinstance(given, str) else json.dumps(dict(given)), name)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(
            f"is not JSON ({error})", field=name, remedy="Give JSON's own types"
        ) from error


def _check_kind(name: str, value: Any) -> None:
    expected = _KIND_OF[name]
    if expected is None or (value is None and CHAT_KEYWORDS[name].default is None):
        return
    kind, remedy = expected
    if not isinstance(value, kind):
        raise _other_kind(value, name, f"Give {remedy}")


def _listed(field: str, value: Any, of: type) -> tuple[Any, ...]:
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise _other_kind(value, field, "Give a list")
    kind, remedy = _KINDS[of]
    for at, item in enumerate(value):
        if not isinstance(item, kind):
            raise _other_kind(item, f"{field}[{at}]", f"Give {remedy}")
    return tuple(value)


def _other_kind(value: Any, field: str, remedy: str) -> InvalidRequestError:
    return InvalidRequestError(f"is a {type(value).__name__}", field=field, remedy=remedy)
