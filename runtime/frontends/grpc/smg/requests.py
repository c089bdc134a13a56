"""Converts GenerateRequest to a request input; unsupported fields are refused by name."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

from trtc.protos.errors import InvalidRequestError
from trtc.protos.sampling import SAMPLING_PARAMETERS, SamplingOptions
from trtc.protos.smg import trtllm_service_pb2 as pb
from trtc.runtime.requests.grammar import Grammar, Kind, schema_or_name
from trtc.runtime.requests.naming import fields_as_sent
from trtc.runtime.requests.request_input import RequestInput
from trtc.runtime.requests.validation import (
    RequestBounds,
    check_number_of_stop_tokens,
    check_prompt_length,
)

_SAMPLING = (*(one.name for one in SAMPLING_PARAMETERS), "seed")
NAMES: Mapping[str, str] = {
    **dict.fromkeys(("prompt", "prompt_ids"), "tokenized.input_token_ids"),
    **{name: f"sampling_config.{name}" for name in (*_SAMPLING, "min_tokens")},
    "n": "sampling_config.num_return_sequences",
    "logprobs": "output_config.logprobs",
    "prompt_logprobs": "output_config.prompt_logprobs",
    "logit_bias": "embedding_bias",
    "cache_salt": "cache_salt_id",
}
"""Field of RequestInput -> field of the message, for errors."""


class _Refused(NamedTuple):
    """An unsupported field, which is refused unless it has its neutral value."""

    path: str
    nothing: Callable[[Any], bool] = lambda value: not value
    remedy: str = "Leave it out"


_GUIDE_KINDS: Mapping[int, Kind] = {
    pb.GuidedDecodingParams.GUIDE_TYPE_JSON: "json_object",
    pb.GuidedDecodingParams.GUIDE_TYPE_JSON_SCHEMA: "json_schema",
    pb.GuidedDecodingParams.GUIDE_TYPE_REGEX: "regex",
    pb.GuidedDecodingParams.GUIDE_TYPE_EBNF_GRAMMAR: "lark",
    pb.GuidedDecodingParams.GUIDE_TYPE_STRUCTURAL_TAG: "structural_tag",
}
_REFUSED = (
    _Refused("tokenized.query_token_ids"),
    _Refused(
        "sampling_config.beam_width",
        lambda width: width in (0, 1),
        "Send 1: there is no beam search; num_return_sequences gives several samples",
    ),
    _Refused("sampling_config.beam_width_array"),
    _Refused("sampling_config.top_p_decay", lambda decay: decay in (0.0, 1.0)),
    _Refused("sampling_config.prompt_ignore_length"),
    _Refused("sampling_config.no_repeat_ngram_size"),
    _Refused("output_config.return_context_logits"),
    _Refused("output_config.return_generation_logits"),
    _Refused("output_config.return_encoder_output"),
    _Refused("output_config.return_perf_metrics"),
    _Refused(
        "lora_config",
        lambda message: not message.ByteSize(),
        "Leave it out: merge the adapter into the checkpoint and build an engine of that",
    ),
    _Refused("prompt_tuning_config.embedding_table"),
    _Refused("multimodal_input.image_data", remedy="Leave it out: prompts are tokens"),
    _Refused("kv_cache_retention", lambda message: not message.ByteSize()),
    _Refused(
        "disaggregated_params.request_type",
        remedy="Send REQUEST_TYPE_CONTEXT_AND_GENERATION: one server does both",
    ),
    _Refused("bad", remedy="Leave it out; an embedding_bias of -100 keeps a token away"),
    _Refused("bad_token_ids", remedy="Leave it out; an embedding_bias of -100 keeps a token away"),
)
"""Fields that change no result are accepted with any value: hints for lookahead decoding, and
parameters of beam search, such as length_penalty."""


def input_of(request: pb.GenerateRequest, bounds: RequestBounds) -> RequestInput:
    """The request input, for the only engine. Lengths are checked here, before a Python object is
    made for every number; values are checked when it is submitted.

    Raises:
        InvalidRequestError: names the field of the message.
    """
    for refused in _REFUSED:
        if not refused.nothing(_value(request, refused.path)):
            raise InvalidRequestError("is not supported", field=refused.path, remedy=refused.remedy)
    with fields_as_sent(NAMES):
        check_prompt_length(len(request.tokenized.input_token_ids), bounds)
        check_number_of_stop_tokens(len(request.stop_token_ids))
    sampling, output = request.sampling_config, request.output_config
    return RequestInput(
        token_ids=tuple(request.tokenized.input_token_ids),
        request_id=request.request_id,
        sampling=_sampling(request, bounds),
        max_tokens=request.max_tokens,
        stop=tuple(request.stop),
        stop_token_ids=tuple(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        min_tokens=sampling.min_tokens,
        n=sampling.num_return_sequences or 1,
        logprobs=output.logprobs if output.HasField("logprobs") else None,
        prompt_logprobs=output.prompt_logprobs if output.HasField("prompt_logprobs") else None,
        grammar=_grammar(request.guided_decoding),
        cache_salt=str(request.cache_salt_id) if request.HasField("cache_salt_id") else "",
    )


def _grammar(asked: pb.GuidedDecodingParams) -> Grammar | None:
    """The grammar of the output."""
    if not asked.guide_type:
        return None
    if asked.guide_type not in _GUIDE_KINDS:
        raise InvalidRequestError(
            "is not supported", field="guided_decoding.guide_type", remedy="Leave it out"
        )
    kind, field = _GUIDE_KINDS[asked.guide_type], "guided_decoding.guide"
    if kind == "json_schema":
        return schema_or_name(asked.guide, field)
    return Grammar(kind, asked.guide, field)


def _sampling(request: pb.GenerateRequest, bounds: RequestBounds) -> SamplingOptions:
    """The given sampling parameters by name."""
    config, bias = request.sampling_config, request.embedding_bias
    given: dict[str, Any] = {
        name: getattr(config, name) for name in _SAMPLING if config.HasField(name)
    }
    if bias and len(bias) != bounds.vocab_size:
        raise InvalidRequestError(
            f"has {len(bias)} values",
            field="embedding_bias",
            remedy=f"Send one for each of the {bounds.vocab_size} tokens",
        )
    if bias:
        given["logit_bias"] = {token: value for token, value in enumerate(bias) if value}
    return cast(SamplingOptions, given)


def _value(message: Any, path: str) -> Any:
    for name in path.split("."):
        message = getattr(message, name)
    return message
