"""trtc.v1 messages <-> the runtime's nouns. No decisions: only validation.py judges values."""

from dataclasses import asdict

from trtc.protos.errors import InvalidRequestError, ServeError
from trtc.protos.trtc.v1 import inference_pb2 as pb
from trtc.runtime.draft import ChatMessage, RequestDraft
from trtc.runtime.model_info import ModelInfo
from trtc.runtime.request import FinishReason, Output, SamplingParams, TokenLogprobs, Usage

_REASON_TO_WIRE = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORTED: pb.FINISH_REASON_ABORTED,
}
_REASON_FROM_WIRE: dict[int, FinishReason] = {
    wire: reason for reason, wire in _REASON_TO_WIRE.items()
}


def draft_to_wire(draft: RequestDraft) -> pb.GenerateRequest:
    """Raises InvalidRequestError for a value that its field cannot carry (a negative count)."""
    try:
        request = pb.GenerateRequest(
            model=draft.model,
            request_id=draft.request_id,
            sampling=_sampling_to_wire(draft.sampling),
            max_tokens=draft.max_tokens,
            stop=draft.stop,
            stop_token_ids=draft.stop_token_ids,
            ignore_eos=draft.ignore_eos,
            n=draft.n,
            logprobs=draft.logprobs,
            priority=draft.priority,
            include_stop=draft.include_stop,
        )
        if draft.text is not None:
            request.text = draft.text
        if draft.token_ids is not None:
            request.token_ids.SetInParent()
            request.token_ids.ids.extend(draft.token_ids)
        if draft.chat is not None:
            request.chat.CopyFrom(chat_to_wire(draft.chat))
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(
            f"the request cannot be written: {error}",
            remedy="Token ids and counts are whole numbers from 0 to 2**32 - 1, text is Unicode",
        ) from error
    return request


def draft_from_wire(request: pb.GenerateRequest) -> RequestDraft:
    kind = request.WhichOneof("prompt")
    return RequestDraft(
        text=request.text if kind == "text" else None,
        token_ids=tuple(request.token_ids.ids) if kind == "token_ids" else None,
        chat=chat_from_wire(request.chat) if kind == "chat" else None,
        model=request.model,
        request_id=request.request_id,
        sampling=_sampling_from_wire(request.sampling),
        max_tokens=request.max_tokens if request.HasField("max_tokens") else None,
        stop=tuple(request.stop),
        stop_token_ids=tuple(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        include_stop=request.include_stop,
        n=request.n if request.HasField("n") else 1,
        logprobs=request.logprobs if request.HasField("logprobs") else None,
        priority=request.priority,
    )


def chat_to_wire(messages: tuple[ChatMessage, ...]) -> pb.ChatMessages:
    return pb.ChatMessages(
        messages=[pb.ChatMessage(role=one.role, content=one.content) for one in messages]
    )


def chat_from_wire(chat: pb.ChatMessages) -> tuple[ChatMessage, ...]:
    return tuple(ChatMessage(one.role, one.content) for one in chat.messages)


def output_to_wire(output: Output) -> pb.GenerateResponse:
    response = pb.GenerateResponse(
        request_id=output.request_id,
        index=output.index,
        text=output.text,
        token_ids=output.token_ids,
    )
    for entry in output.logprobs:
        response.logprobs.append(_logprobs_to_wire(entry))
    if output.finish_reason is not None:
        response.finished.reason = _REASON_TO_WIRE[output.finish_reason]
        response.finished.matched_stop = output.matched_stop
    if output.usage is not None:
        response.usage.prompt_tokens = output.usage.prompt_tokens
        response.usage.cached_prompt_tokens = output.usage.cached_prompt_tokens
        response.usage.completion_tokens = output.usage.completion_tokens
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
    )


def _reason_from_wire(reason: int) -> FinishReason:
    if reason not in _REASON_FROM_WIRE:
        raise ServeError(
            f"the server ended a sequence for reason {reason}, which this client does not know",
            remedy="Use a client as new as the server",
        )
    return _REASON_FROM_WIRE[reason]


def info_to_wire(info: ModelInfo) -> pb.ModelInfo:
    """The message has the noun's fields, name for name."""
    return pb.ModelInfo(**asdict(info))


def info_from_wire(info: pb.ModelInfo) -> ModelInfo:
    values = {field.name: getattr(info, field.name) for field in pb.ModelInfo.DESCRIPTOR.fields}
    return ModelInfo(**{**values, "eos_token_ids": tuple(info.eos_token_ids)})


def _usage_from_wire(usage: pb.Usage) -> Usage:
    return Usage(usage.prompt_tokens, usage.cached_prompt_tokens, usage.completion_tokens)


def _logprobs_to_wire(entry: TokenLogprobs) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(
        sampled=pb.TokenLogprob(token_id=entry.token_id, logprob=entry.logprob),
        top=[pb.TokenLogprob(token_id=token, logprob=value) for token, value in entry.top],
    )


def _logprobs_from_wire(entry: pb.TokenLogprobs) -> TokenLogprobs:
    top = tuple((one.token_id, one.logprob) for one in entry.top)
    return TokenLogprobs(entry.sampled.token_id, entry.sampled.logprob, top)


def _sampling_to_wire(sampling: SamplingParams) -> pb.SamplingParams:
    return pb.SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=sampling.logit_bias,
        seed=sampling.seed,
    )


def _sampling_from_wire(sampling: pb.SamplingParams) -> SamplingParams:
    """Absent fields take SamplingParams' own defaults."""
    return SamplingParams(
        temperature=sampling.temperature if sampling.HasField("temperature") else 1.0,
        top_k=sampling.top_k,
        top_p=sampling.top_p if sampling.HasField("top_p") else 1.0,
        min_p=sampling.min_p,
        repetition_penalty=(
            sampling.repetition_penalty if sampling.HasField("repetition_penalty") else 1.0
        ),
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=dict(sampling.logit_bias),
        seed=sampling.seed if sampling.HasField("seed") else None,
    )
