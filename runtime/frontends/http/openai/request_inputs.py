"""Converts the fields of OpenAI and vLLM to request inputs."""

from typing import Any, cast

from trtc.protos.errors import InvalidRequestError
from trtc.runtime.frontends.http.generation import generation
from trtc.runtime.frontends.http.logprobs import asked_logprobs
from trtc.runtime.frontends.http.messages import chat_messages
from trtc.runtime.frontends.http.openai.fields import (
    ChatFields,
    ChoiceFields,
    CommonFields,
    CompletionFields,
    TokenizeFields,
)
from trtc.runtime.frontends.http.openai.params import CHAT
from trtc.runtime.frontends.http.structured import grammar_of, response_format
from trtc.runtime.requests.naming import fields_as_sent
from trtc.runtime.requests.prompts import Prompt, read_prompts
from trtc.runtime.requests.request_input import RequestInput
from trtc.runtime.requests.tool_choice import AUTO, tool_choice
from trtc.runtime.text.chat import Chat
from trtc.runtime.text.chat_options import chat_of

DEFAULT_COMPLETION_TOKENS = 16
"""Default of `max_tokens` for completions in OpenAI's API."""
MAX_PROMPTS = 256
"""Most prompts of one completion."""


def chat_input(fields: ChatFields, request_id: str) -> RequestInput:
    """The request input of a chat completion.

    Raises:
        InvalidRequestError: names the field of the conversation that is wrong.
    """
    _check_choices(fields)
    chat = conversation(fields)
    limit = fields.max_completion_tokens
    return RequestInput(
        chat=chat,
        request_id=request_id,
        max_tokens=fields.max_tokens if limit is None else limit,
        logprobs=asked_logprobs(fields.logprobs, fields.top_logprobs),
        prompt_logprobs=fields.prompt_logprobs,
        n=1 if fields.n is None else fields.n,
        grammar=grammar_of(fields, response_format(fields.response_format)),
        tool_choice=tool_choice(fields.tool_choice) or AUTO,
        splits_answer=True,
        parallel_tool_calls=fields.parallel_tool_calls is not False,
        thinking_token_budget=fields.thinking_token_budget,
        **common(fields),
    )


def conversation(fields: ChatFields | TokenizeFields) -> Chat:
    """The conversation of a request, with the other inputs of the chat template.

    Raises:
        InvalidRequestError: names the field that is wrong.
    """
    if fields.messages is None:
        raise InvalidRequestError("is missing", field="messages", remedy="Give a list of messages")
    messages = chat_messages(fields.messages)
    template: dict[str, Any] = {
        "chat_template_kwargs": fields.chat_template_kwargs,
        "documents": fields.documents,
        "enable_thinking": fields.enable_thinking,
        "reasoning_effort": fields.reasoning_effort,
        "tools": fields.tools,
        "add_generation_prompt": fields.add_generation_prompt,
        "continue_final_message": bool(fields.continue_final_message),
    }
    if fields.continue_final_message:
        # vLLM's clients give both, or leave the second at its default.
        template["add_generation_prompt"] = fields.add_generation_prompt or None
    with fields_as_sent(CHAT):
        return chat_of(messages, cast(Any, template))


def completion_inputs(fields: CompletionFields, request_id: str) -> tuple[RequestInput, ...]:
    """The request inputs of a completion, one per prompt.

    Raises:
        InvalidRequestError: names the field that is wrong.
    """
    if fields.prompt is None:
        raise InvalidRequestError("is missing", field="prompt", remedy="Give a text or token ids")
    _check_choices(fields)
    if fields.best_of is not None and fields.best_of != (fields.n or 1):
        raise InvalidRequestError("is not supported", field="best_of", remedy="Leave it out")
    prompts = _prompts(fields.prompt)
    limit = DEFAULT_COMPLETION_TOKENS if fields.max_tokens is None else fields.max_tokens
    if limit == 0 and fields.echo:
        limit = 1  # sampled, but not returned: `echo` alone
    asked = {
        "max_tokens": limit,
        "logprobs": fields.logprobs,
        "prompt_logprobs": _prompt_logprobs(fields),
        "n": 1 if fields.n is None else fields.n,
        "grammar": grammar_of(fields, response_format(fields.response_format)),
        **common(fields),
    }
    if len(prompts) == 1:
        return (_of_prompt(prompts[0], request_id=request_id, **asked),)
    return tuple(
        _of_prompt(one, request_id=f"{request_id}-{at}", **asked) for at, one in enumerate(prompts)
    )


def _of_prompt(prompt: Prompt, **asked: Any) -> RequestInput:
    if isinstance(prompt, str):
        return RequestInput(text=prompt, **asked)
    return RequestInput(token_ids=tuple(prompt), **asked)


def _prompts(prompt: str | list[Any]) -> list[Prompt]:
    prompts = read_prompts(prompt)
    listed = prompts if isinstance(prompts, list) else [prompts]
    if len(listed) > MAX_PROMPTS:
        raise InvalidRequestError(
            f"has {len(listed)} prompts", field="prompt", remedy=f"Give at most {MAX_PROMPTS}"
        )
    return listed


def _prompt_logprobs(fields: CompletionFields) -> int | None:
    if fields.prompt_logprobs is None and fields.echo:
        return fields.logprobs
    return fields.prompt_logprobs


def _check_choices(fields: ChoiceFields) -> None:
    if fields.stream_options is not None and not fields.stream:
        raise InvalidRequestError(
            "is given without stream", field="stream_options", remedy='Give "stream": true'
        )
    if fields.prompt_logprobs is not None and fields.stream:
        raise InvalidRequestError(
            "is not available in streams", field="prompt_logprobs", remedy='Give "stream": false'
        )


def common(fields: CommonFields) -> dict[str, Any]:
    """Keyword arguments of RequestInput that all endpoints share."""
    stop = fields.stop
    return {
        **generation(fields),
        "stop": () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop),
        "include_stop": bool(fields.include_stop_str_in_output),
    }
