"""Converts trtc.v1 messages to the runtime's data types and back. Values are not validated here."""

from typing import Any, cast

import msgspec

from trtc.protos.errors import InvalidRequestError, ServeError
from trtc.protos.sampling import SamplingOptions
from trtc.protos.trtc.v1 import inference_pb2 as pb
from trtc.runtime.requests.grammar import Grammar, choice
from trtc.runtime.requests.model_info import ModelInfo
from trtc.runtime.requests.request import FinishReason, Output, TokenLogprobs, Usage
from trtc.runtime.requests.request_input import RequestInput
from trtc.runtime.requests.tool_choice import AUTO, ToolChoice, ToolMode
from trtc.runtime.text.answer import AnswerPart
from trtc.runtime.text.chat import MAX_MESSAGE_ITEMS, Chat, ChatMessage, ContentPart, ToolCall

_REASON_TO_WIRE = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORTED: pb.FINISH_REASON_ABORTED,
}
_REASON_FROM_WIRE: dict[int, FinishReason] = {
    wire: reason for reason, wire in _REASON_TO_WIRE.items()
}

_MODE_TO_WIRE: dict[ToolMode, pb.ToolChoice.Mode] = {
    "auto": pb.ToolChoice.AUTO,
    "none": pb.ToolChoice.NONE,
    "required": pb.ToolChoice.REQUIRED,
}
_MODE_FROM_WIRE: dict[int, ToolMode] = {wire: mode for mode, wire in _MODE_TO_WIRE.items()}

_CONVERTED = ("text", "token_ids", "chat", "sampling", "grammar", "tool_choice")
_SAME = tuple(one for one in RequestInput.__struct_fields__ if one not in _CONVERTED)
"""Fields that a request input and its message both have, as they are."""
_LISTS = ("stop", "stop_token_ids")


def input_to_wire(request_input: RequestInput) -> pb.GenerateRequest:
    """Raises InvalidRequestError for a value that its field cannot encode (a negative count)."""
    try:
        request = pb.GenerateRequest(
            **{name: getattr(request_input, name) for name in _SAME},
            sampling=pb.SamplingParams(**request_input.sampling),
        )
        if request_input.text is not None:
            request.text = request_input.text
        if request_input.token_ids is not None:
            request.token_ids.SetInParent()
            request.token_ids.ids.extend(request_input.token_ids)
        if request_input.chat is not None:
            request.chat.CopyFrom(chat_to_wire(request_input.chat))
        if request_input.grammar is not None:
            request.grammar.CopyFrom(_grammar_to_wire(request_input.grammar))
        if request_input.tool_choice != AUTO:
            request.tool_choice.CopyFrom(_choice_to_wire(request_input.tool_choice))
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(
            f"the request cannot be written: {error}",
            remedy="Token ids and counts are whole numbers from 0 to 2**32 - 1, text is Unicode",
        ) from error
    return request


def input_from_wire(request: pb.GenerateRequest) -> RequestInput:
    """Fields that the message leaves out have RequestInput's defaults."""
    kind = request.WhichOneof("prompt")
    given: dict[str, Any] = {
        field.name: tuple(value) if field.name in _LISTS else value
        for field, value in request.ListFields()
        if field.name in _SAME
    }
    return RequestInput(
        text=request.text if kind == "text" else None,
        token_ids=tuple(request.token_ids.ids) if kind == "token_ids" else None,
        chat=chat_from_wire(request.chat) if kind == "chat" else None,
        sampling=_sampling_from_wire(request.sampling),
        grammar=_grammar_from_wire(request.grammar) if request.HasField("grammar") else None,
        tool_choice=_choice_from_wire(request.tool_choice),
        **given,
    )


def _grammar_to_wire(grammar: Grammar) -> pb.Grammar:
    if grammar.kind == "json_object":
        return pb.Grammar(json_object=True)
    if grammar.kind == "choice":
        return pb.Grammar(choice=pb.Texts(texts=msgspec.json.decode(grammar.text)))
    message = pb.Grammar()
    setattr(message, grammar.kind, grammar.text)
    return message


def _grammar_from_wire(grammar: pb.Grammar) -> Grammar | None:
    kind = grammar.WhichOneof("kind")
    if kind == "choice":
        return choice(grammar.choice.texts)
    if kind == "json_object":
        return Grammar("json_object") if grammar.json_object else None
    return None if kind is None else Grammar(kind, getattr(grammar, kind))


def _choice_to_wire(choice: ToolChoice) -> pb.ToolChoice:
    return pb.ToolChoice(mode=_MODE_TO_WIRE[choice.mode], names=choice.names)


def _choice_from_wire(choice: pb.ToolChoice) -> ToolChoice:
    """Raises InvalidRequestError for a mode of a later version."""
    if choice.mode not in _MODE_FROM_WIRE:
        raise InvalidRequestError(
            f"is {choice.mode}", field="tool_choice.mode", remedy="Give AUTO, NONE or REQUIRED"
        )
    return ToolChoice(_MODE_FROM_WIRE[choice.mode], tuple(choice.names))


def chat_to_wire(chat: Chat) -> pb.ChatMessages:
    return pb.ChatMessages(
        messages=[_message_to_wire(message) for message in chat.messages],
        tools=chat.tools,
        documents=chat.documents,
        template_kwargs=chat.template_kwargs,
        add_generation_prompt=chat.add_generation_prompt,
        continue_final_message=chat.continue_final_message,
    )


def _message_to_wire(message: ChatMessage) -> pb.ChatMessage:
    return pb.ChatMessage(
        role=message.role,
        content=message.content,
        parts=[pb.ContentPart(type=part.type, text=part.text) for part in message.parts],
        name=message.name,
        tool_calls=[
            pb.ToolCall(
                id=call.id,
                type=call.type,
                function=pb.FunctionCall(name=call.name, arguments=call.arguments),
            )
            for call in message.tool_calls
        ],
        tool_call_id=message.tool_call_id,
        reasoning_content=message.reasoning_content,
    )


def chat_from_wire(chat: pb.ChatMessages) -> Chat:
    """Raises InvalidRequestError for a message with too many parts, before they use memory."""
    adds_prompt = chat.HasField("add_generation_prompt")
    return Chat(
        messages=tuple(
            _message_from_wire(message, f"chat.messages[{at}]")
            for at, message in enumerate(chat.messages)
        ),
        tools=chat.tools,
        documents=chat.documents,
        template_kwargs=chat.template_kwargs,
        add_generation_prompt=chat.add_generation_prompt if adds_prompt else None,
        continue_final_message=chat.continue_final_message,
    )


def _message_from_wire(message: pb.ChatMessage, field: str) -> ChatMessage:
    for name, items in (("parts", message.parts), ("tool_calls", message.tool_calls)):
        if len(items) > MAX_MESSAGE_ITEMS:
            raise InvalidRequestError(
                f"has {len(items)} items",
                field=f"{field}.{name}",
                remedy=f"Give at most {MAX_MESSAGE_ITEMS}",
            )
    return ChatMessage(
        role=message.role,
        content=message.content if message.HasField("content") else None,
        parts=tuple(ContentPart(part.text, part.type or "text") for part in message.parts),
        name=message.name,
        tool_calls=tuple(
            ToolCall(
                name=call.function.name,
                arguments=call.function.arguments,
                id=call.id,
                type=call.type or "function",
            )
            for call in message.tool_calls
        ),
        tool_call_id=message.tool_call_id,
        reasoning_content=message.reasoning_content,
    )


def output_to_wire(output: Output) -> pb.GenerateResponse:
    response = pb.GenerateResponse(
        request_id=output.request_id,
        index=output.index,
        text=output.text,
        token_ids=output.token_ids,
    )
    for entry in output.logprobs:
        response.logprobs.append(_logprobs_to_wire(entry))
    for entry in output.prompt_logprobs:
        response.prompt_logprobs.append(_logprobs_to_wire(entry))
    if output.finish_reason is not None:
        response.finished.reason = _REASON_TO_WIRE[output.finish_reason]
        response.finished.matched_stop = output.matched_stop
    if output.usage is not None:
        response.usage.prompt_tokens = output.usage.prompt_tokens
        response.usage.cached_prompt_tokens = output.usage.cached_prompt_tokens
        response.usage.completion_tokens = output.usage.completion_tokens
        response.usage.reasoning_tokens = output.usage.reasoning_tokens
    response.parts.extend(_part_to_wire(part) for part in output.parts)
    return response


def output_from_wire(response: pb.GenerateResponse) -> Output:
    finished = response.finished if response.HasField("finished") else None
    return Output(
        request_id=response.request_id,
        index=response.index,
        token_ids=tuple(response.token_ids),
        text=response.text,
        logprobs=tuple(_logprobs_from_wire(entry) for entry in response.logprobs),
        finish_reason=_reason_from_wire(finished.reason) if finished is not None else None,
        matched_stop=finished.matched_stop if finished is not None else "",
        usage=_usage_from_wire(response.usage) if response.HasField("usage") else None,
        prompt_logprobs=tuple(_logprobs_from_wire(entry) for entry in response.prompt_logprobs),
        parts=tuple(part for one in response.parts if (part := _part_from_wire(one)) is not None),
    )


def _part_to_wire(part: AnswerPart) -> pb.AnswerPart:
    if part.kind == "call":
        call = pb.AnswerCall(index=part.index, id=part.id, name=part.name, arguments=part.text)
        return pb.AnswerPart(call=call)
    if part.kind == "reasoning":
        return pb.AnswerPart(reasoning=part.text)
    return pb.AnswerPart(text=part.text)


def _part_from_wire(part: pb.AnswerPart) -> AnswerPart | None:
    """An answer part; None: this client does not know its kind."""
    kind = part.WhichOneof("kind")
    if kind == "call":
        call = part.call
        return AnswerPart("call", call.arguments, call.index, call.id, call.name)
    if kind is None:
        return None
    return AnswerPart(kind, part.reasoning if kind == "reasoning" else part.text)


def _reason_from_wire(reason: int) -> FinishReason:
    if reason not in _REASON_FROM_WIRE:
        raise ServeError(
            f"the server ended a sequence for reason {reason}, which this client does not know",
            remedy="Use a client as new as the server",
        )
    return _REASON_FROM_WIRE[reason]


def info_to_wire(info: ModelInfo) -> pb.ModelInfo:
    """The message has the same field names as ModelInfo."""
    return pb.ModelInfo(**msgspec.structs.asdict(info))


def info_from_wire(info: pb.ModelInfo) -> ModelInfo:
    values = {field.name: getattr(info, field.name) for field in pb.ModelInfo.DESCRIPTOR.fields}
    values["eos_token_ids"] = tuple(info.eos_token_ids)
    values["grammars"] = tuple(info.grammars)
    values["sampling_defaults"] = _sampling_from_wire(info.sampling_defaults)
    if not info.HasField("default_max_tokens"):
        values["default_max_tokens"] = None
    return ModelInfo(**values)


def _usage_from_wire(usage: pb.Usage) -> Usage:
    return Usage(
        usage.prompt_tokens,
        usage.cached_prompt_tokens,
        usage.completion_tokens,
        usage.reasoning_tokens,
    )


def _logprobs_to_wire(entry: TokenLogprobs) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(
        sampled=pb.TokenLogprob(token_id=entry.token_id, logprob=entry.logprob, utf8=entry.utf8),
        top=[
            pb.TokenLogprob(token_id=token, logprob=value, utf8=utf8)
            for (token, value), utf8 in zip(entry.top, entry.top_utf8, strict=True)
        ],
    )


def _logprobs_from_wire(entry: pb.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(
        token_id=entry.sampled.token_id,
        logprob=entry.sampled.logprob,
        top=tuple((one.token_id, one.logprob) for one in entry.top),
        utf8=entry.sampled.utf8,
        top_utf8=tuple(one.utf8 for one in entry.top),
    )


def _sampling_from_wire(sampling: pb.SamplingParams) -> SamplingOptions:
    """The fields that are set, by name."""
    given: dict[str, Any] = {
        field.name: getattr(sampling, field.name) for field, _ in sampling.ListFields()
    }
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])
    return cast(SamplingOptions, given)
