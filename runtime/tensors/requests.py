"""A request's tensors become inputs, one a row of the batch. Knows numpy, nothing of Triton.

Values have TensorRT-LLM's meaning: without top_k and top_p decoding is greedy, the end token is not
part of the output, and stop words are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from trtc.protos.errors import InvalidRequestError, NoTokenizerError
from trtc.protos.sampling import SAMPLING_PARAMETERS, SamplingOptions
from trtc.runtime.engine.handle import EngineHandle
from trtc.runtime.requests.grammar import Grammar, Kind
from trtc.runtime.requests.naming import fields_as_sent
from trtc.runtime.requests.request_input import RequestInput
from trtc.runtime.requests.validation import (
    MAX_STOP_TOKENS,
    RequestBounds,
    check_prompt_length,
    check_stop_strings,
)
from trtc.runtime.tensors.rows import Row
from trtc.runtime.tensors.table import REFUSED_INPUTS
from trtc.runtime.text.tokenizer import Tokenizer

Tensors = Mapping[str, NDArray[Any]]
"""Input name -> array with its batch axis."""

MAX_BIAS_WORDS = 1024
"""Most entries of embedding_bias_words, each of which is tokenised."""
_OTHER_NAMES = {"top_k": ("runtime_top_k",), "top_p": ("runtime_top_p",)}
"""Sampling parameter -> further names."""


GUIDE_KINDS: Mapping[str, Kind] = {
    "json": "json_object",
    "json_schema": "json_schema",
    "regex": "regex",
    "ebnf_grammar": "lark",
    "structural_tag": "structural_tag",
    "named": "named",
}
"""TensorRT-LLM's guide type -> kind of grammar. Its `json` allows any document, ours only objects.
`named` is an extension: the guide is the name of a grammar of the engine."""


@dataclass(frozen=True)
class RowRequest:
    """One row: what to generate, and how to reply."""

    request_input: RequestInput
    stream: bool
    """Whether each step's tokens are a message, instead of one message at the end."""
    with_prompt: bool
    """Whether the prompt precedes the completion; not when streaming."""
    end_ids: frozenset[int]
    """Tokens that end the completion and are not part of it."""
    silent_ids: frozenset[int]
    """Tokens that end the completion and have no text: end and special tokens."""
    log_probs: bool
    num_input_tokens: bool
    """Whether to return the number of input tokens."""
    num_output_tokens: bool
    sent_as: Mapping[str, str]
    """Field of the request input -> the input that it came from, for messages."""


@dataclass(frozen=True)
class RequestReader:
    """Reads requests to one engine."""

    tokenizer: Tokenizer | None
    bounds: RequestBounds
    eos_token_ids: frozenset[int]
    exclude_input_in_output: bool
    """Default for requests."""

    @classmethod
    def of(cls, handle: EngineHandle, *, exclude_input_in_output: bool) -> "RequestReader":
        """The reader of an open engine."""
        return cls(
            tokenizer=handle.tokenizer,
            bounds=handle.loop.bounds,
            eos_token_ids=frozenset(handle.manifest.model.eos_token_ids),
            exclude_input_in_output=exclude_input_in_output,
        )

    def read(self, tensors: Tensors) -> list[RowRequest]:
        """One request for each row of the batch. Lengths are checked before a Python object is made
        for every number; values are checked at submission.

        Raises:
            InvalidRequestError: an input is missing, contradicts another or asks for something
                that the runtime does not do; names it.
            NoTokenizerError: an input of words, for an engine that has no tokenizer.
        """
        return [self._read_row(Row(tensors, index)) for index in range(_num_rows(tensors))]

    def _read_row(self, row: Row) -> RowRequest:
        _check_refused(row)
        text, token_ids = self._prompt(row)
        end_id = row.value("end_id", field="stop_token_ids")
        stop, stop_token_ids = self._stops(row)
        end_ids = self.eos_token_ids if end_id is None else frozenset({end_id} - {-1})
        log_probs = bool(row.value("return_log_probs"))
        stream = bool(row.value("stream", "streaming"))
        exclude_prompt = row.value("exclude_input_in_output")
        if exclude_prompt is None:
            exclude_prompt = self.exclude_input_in_output
        request_input = RequestInput(
            text=text,
            token_ids=token_ids,
            sampling=self._sampling(row),
            max_tokens=row.value("max_tokens", "request_output_len"),
            stop=stop,
            # The engine's own end tokens need not be listed.
            stop_token_ids=(*stop_token_ids, *(() if end_id is None else end_ids)),
            ignore_eos=end_id is not None,
            min_tokens=row.value("min_tokens", "min_length") or 0,
            include_stop=True,
            n=row.value("num_return_sequences", field="n") or 1,
            logprobs=0 if log_probs else None,
            grammar=_grammar(row),
        )
        return RowRequest(
            request_input=request_input,
            stream=stream,
            with_prompt=not exclude_prompt and not stream,
            end_ids=end_ids,
            silent_ids=end_ids | {token for token in stop_token_ids if self._is_special(token)},
            log_probs=log_probs,
            num_input_tokens=bool(row.value("return_num_input_tokens")),
            num_output_tokens=bool(row.value("return_num_output_tokens")),
            sent_as=row.sent_as,
        )

    def _prompt(self, row: Row) -> tuple[str | None, tuple[int, ...] | None]:
        if row.array("text_input") is not None:
            for field in ("prompt", "text", "prompt.text"):
                row.name_field(field, "text_input")
            (text,) = row.texts("text_input")
            return text, None
        for field in ("prompt", "prompt_ids"):
            row.name_field(field, "input_ids")
        num_tokens = row.size("input_ids")
        length = row.value("input_lengths")
        if length is not None and not 1 <= length <= num_tokens:
            raise InvalidRequestError(
                f"is {length}, input_ids has {num_tokens} tokens",
                field="input_lengths",
                remedy="Send how many of them are the prompt",
            )
        with fields_as_sent(row.sent_as):
            check_prompt_length(num_tokens if length is None else length, self.bounds)
        return None, tuple(row.values("input_ids", limit=length))

    def _sampling(self, row: Row) -> SamplingOptions:
        """The sampling parameters of the request and the model. A top_p or top_k of 0 means none;
        if neither gives any, decoding is greedy."""
        sent = {
            "seed": row.value("seed", "random_seed"),
            "logit_bias": self._logit_bias(row) or None,
            **{
                one.name: row.value(one.name, *_OTHER_NAMES.get(one.name, ()))
                for one in SAMPLING_PARAMETERS
            },
        }
        given = {name: value for name, value in sent.items() if value is not None}
        known = {**self.bounds.defaults.sampling(), **given}
        narrowed = known.get("top_k") or known.get("top_p")
        if not narrowed and known.get("temperature", 1.0) >= 0.0:
            given["temperature"] = 0.0
        if given.get("top_p") == 0.0:
            given["top_p"] = 1.0
        return cast(SamplingOptions, given)

    def _logit_bias(self, row: Row) -> Mapping[int, float]:
        """Biases by words, all of whose tokens get the word's weight, or by an array with a bias
        for every token."""
        _check_number(row, "embedding_bias_words", MAX_BIAS_WORDS)
        words = row.texts("embedding_bias_words")
        weights = row.values("embedding_bias_weights")
        if len(words) != len(weights):
            raise InvalidRequestError(
                f"has {len(weights)} weights for {len(words)} words",
                field="embedding_bias_weights",
                remedy="Send one for each of embedding_bias_words",
            )
        row.name_field("logit_bias", "embedding_bias_weights")
        bias = dict[int, float]()
        for word, weight in zip(words, weights, strict=True):
            for token in self._tokens(word, "embedding_bias_words"):
                bias[token] = bias.get(token, 0.0) + weight
        dense = row.array("embedding_bias")
        if dense is None or not dense.size:
            return bias
        if dense.size != self.bounds.vocab_size:
            raise InvalidRequestError(
                f"has {dense.size} values",
                field="embedding_bias",
                remedy=f"Send one for each of the {self.bounds.vocab_size} tokens",
            )
        row.name_field("logit_bias", "embedding_bias")
        for token in np.flatnonzero(dense).tolist():
            bias[token] = bias.get(token, 0.0) + float(dense[token])
        return bias

    def _stops(self, row: Row) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Stop strings and stop tokens; special tokens have no text, so they are stop tokens."""
        texts, tokens = list[str](), list[int]()
        words = [word for word in row.texts("stop_words", field="stop") if word]
        with fields_as_sent(row.sent_as):
            check_stop_strings(words)
        for word in words:
            found = self._tokens(word, "stop_words")
            if len(found) == 1 and self._is_special(found[0]):
                tokens.append(found[0])
            else:
                texts.append(word)
        _check_number(row, "stop_words_list", 2 * MAX_STOP_TOKENS)
        for ids in row.word_list("stop_words_list", field="stop_token_ids"):
            if len(ids) > 1:
                raise InvalidRequestError(
                    f"has a stop word of {len(ids)} tokens",
                    field="stop_words_list",
                    remedy="Send words of one token, or text in stop_words",
                )
            tokens.extend(ids)
        return tuple(texts), tuple(tokens)

    def _tokens(self, word: str, name: str) -> Sequence[int]:
        if self.tokenizer is None:
            raise NoTokenizerError(
                "the engine was built without a tokenizer",
                field=name,
                remedy="Leave it out, or build from a checkpoint with tokenizer.json",
            )
        return self.tokenizer.encode(word, add_special_tokens=False)

    def _is_special(self, token: int) -> bool:
        return self.tokenizer is not None and not self.tokenizer.decode((token,))


def _grammar(row: Row) -> Grammar | None:
    """The grammar of the output; empty texts, which some clients send, mean none."""
    kinds, guides = row.texts("guided_decoding_guide_type"), row.texts("guided_decoding_guide")
    kind, guide = "".join(kinds[:1]), "".join(guides[:1])
    if not kind and not guide:
        return None
    if kind not in GUIDE_KINDS:
        raise InvalidRequestError(
            f"is {kind[:40]!r}",
            field="guided_decoding_guide_type",
            remedy=f"Send {', '.join(GUIDE_KINDS)}",
        )
    return Grammar(GUIDE_KINDS[kind], guide, "guided_decoding_guide")


def _check_number(row: Row, name: str, limit: int) -> None:
    if row.size(name) > limit:
        raise InvalidRequestError(
            f"has {row.size(name)} values", field=name, remedy=f"Send at most {limit}"
        )


def asks_to_stop(tensors: Tensors) -> bool:
    """Whether it is a stop request, for the running request of the same id."""
    return "stop" in tensors and bool(np.any(tensors["stop"]))


def _num_rows(tensors: Tensors) -> int:
    """Rows of the batch.

    Raises:
        InvalidRequestError: there is no prompt, or an input has another number of rows.
    """
    prompts = [name for name in ("text_input", "input_ids") if name in tensors]
    if len(prompts) != 1:
        raise InvalidRequestError(
            "is sent beside input_ids" if prompts else "is missing",
            field="text_input",
            remedy="Send the prompt as text_input or as input_ids",
        )
    num_rows = len(tensors[prompts[0]])
    for name, values in tensors.items():
        if len(values) != num_rows:
            raise InvalidRequestError(
                f"has {len(values)} rows, {prompts[0]} has {num_rows}",
                field=name,
                remedy="Send the same batch size in every input",
            )
    return num_rows


def _check_refused(row: Row) -> None:
    for refused in REFUSED_INPUTS:
        sent = row.array(refused.tensor.name)
        if sent is not None and not refused.asks_nothing(sent):
            raise InvalidRequestError(
                "is not supported", field=refused.tensor.name, remedy=refused.remedy
            )
