"""The tensors of a model: names, types and shapes of NVIDIA's tensorrtllm_backend.

Both of its levels are supported, so that clients of either need no change: text (its `ensemble` and
`tensorrt_llm_bls`: `text_input`, `max_tokens`, ...) and tokens (its `tensorrt_llm`: `input_ids`,
`request_output_len`, ...). Every shape has the batch axis before `dims`. Descriptions of a model
(config.pbtxt, KServe's metadata) are generated from these tables, and requests are read by them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from trtc.protos.sampling import SAMPLING_PARAMETERS

DataType = Literal[
    "TYPE_STRING", "TYPE_BOOL", "TYPE_INT32", "TYPE_UINT64", "TYPE_FP16", "TYPE_FP32"
]
Dims = tuple[int, ...]
"""Extents without the batch axis; -1: any."""


@dataclass(frozen=True)
class Tensor:
    name: str
    data_type: DataType
    dims: Dims = (1,)


@dataclass(frozen=True)
class RefusedInput:
    """An unsupported input, which is refused unless it has its neutral value."""

    tensor: Tensor
    asks_nothing: Callable[[NDArray[Any]], bool]
    """Whether a row has the neutral value."""
    remedy: str


def _only(*values: object) -> Callable[[NDArray[Any]], bool]:
    return lambda row: all(one in values for one in row.reshape(-1).tolist())


def _no_words(row: NDArray[Any]) -> bool:
    """Whether a word list [2, L] (ids, and ends of words with -1 as padding) is empty."""
    return bool(np.all(row[..., -1, :] == -1))


_DATA_TYPES: Mapping[str, DataType] = {"i32": "TYPE_INT32", "f32": "TYPE_FP32"}

READ_INPUTS: tuple[Tensor, ...] = (
    Tensor("text_input", "TYPE_STRING"),
    Tensor("input_ids", "TYPE_INT32", (-1,)),
    Tensor("input_lengths", "TYPE_INT32"),
    Tensor("max_tokens", "TYPE_INT32"),
    Tensor("request_output_len", "TYPE_INT32"),
    Tensor("stop_words", "TYPE_STRING", (-1,)),
    Tensor("stop_words_list", "TYPE_INT32", (2, -1)),
    Tensor("end_id", "TYPE_INT32"),
    Tensor("min_tokens", "TYPE_INT32"),
    Tensor("min_length", "TYPE_INT32"),
    *(Tensor(one.name, _DATA_TYPES[one.dtype]) for one in SAMPLING_PARAMETERS),
    Tensor("runtime_top_k", "TYPE_INT32"),
    Tensor("runtime_top_p", "TYPE_FP32"),
    Tensor("embedding_bias_words", "TYPE_STRING", (-1,)),
    Tensor("embedding_bias_weights", "TYPE_FP32", (-1,)),
    Tensor("embedding_bias", "TYPE_FP32", (-1,)),
    Tensor("guided_decoding_guide_type", "TYPE_STRING"),
    Tensor("guided_decoding_guide", "TYPE_STRING"),
    Tensor("seed", "TYPE_UINT64"),
    Tensor("random_seed", "TYPE_UINT64"),
    Tensor("num_return_sequences", "TYPE_INT32"),
    Tensor("stream", "TYPE_BOOL"),
    Tensor("streaming", "TYPE_BOOL"),
    Tensor("stop", "TYPE_BOOL"),
    Tensor("exclude_input_in_output", "TYPE_BOOL"),
    Tensor("return_log_probs", "TYPE_BOOL"),
    Tensor("return_num_input_tokens", "TYPE_BOOL"),
    Tensor("return_num_output_tokens", "TYPE_BOOL"),
)
"""Inputs that requests may have."""

EMPTY_INPUTS: tuple[Tensor, ...] = (
    Tensor("pad_id", "TYPE_INT32"),
    Tensor("length_penalty", "TYPE_FP32"),
    Tensor("len_penalty", "TYPE_FP32"),
    Tensor("early_stopping", "TYPE_BOOL"),
    Tensor("beam_search_diversity_rate", "TYPE_FP32"),
)
"""Inputs without effect: batches are not padded, and there is no beam search."""

_NO_ADAPTERS = "Leave it out: merge the adapter into the checkpoint and build an engine of that"

REFUSED_INPUTS: tuple[RefusedInput, ...] = (
    RefusedInput(
        Tensor("beam_width", "TYPE_INT32"),
        _only(0, 1),
        "Send 1: there is no beam search; num_return_sequences gives several samples",
    ),
    RefusedInput(
        Tensor("bad_words", "TYPE_STRING", (-1,)),
        _only(b""),
        "Leave it out; embedding_bias_words with a weight of -100 keeps a token away",
    ),
    RefusedInput(
        Tensor("bad_words_list", "TYPE_INT32", (2, -1)),
        _no_words,
        "Leave it out; embedding_bias of -100 keeps a token away",
    ),
    *(
        RefusedInput(Tensor(name, "TYPE_BOOL"), _only(False), "Leave it out, or send false")
        for name in ("return_context_logits", "return_generation_logits", "return_perf_metrics")
    ),
    RefusedInput(Tensor("lora_task_id", "TYPE_UINT64"), _only(0), _NO_ADAPTERS),
    RefusedInput(Tensor("lora_weights", "TYPE_FP16", (-1, -1)), _only(), _NO_ADAPTERS),
    RefusedInput(Tensor("lora_config", "TYPE_INT32", (-1, 3)), _only(), _NO_ADAPTERS),
)
"""Inputs of other deployments of TensorRT-LLM, whose clients often send the neutral value."""

INPUTS: tuple[Tensor, ...] = (
    *READ_INPUTS,
    *EMPTY_INPUTS,
    *(refused.tensor for refused in REFUSED_INPUTS),
)
"""All inputs are optional; errors of a request name those that are needed together."""

OUTPUTS: tuple[Tensor, ...] = (
    Tensor("text_output", "TYPE_STRING", (-1,)),
    Tensor("output_ids", "TYPE_INT32", (-1, -1)),
    Tensor("sequence_length", "TYPE_INT32", (-1,)),
    Tensor("finish_reason", "TYPE_STRING", (-1,)),
    Tensor("cum_log_probs", "TYPE_FP32", (-1,)),
    Tensor("output_log_probs", "TYPE_FP32", (-1, -1)),
    Tensor("batch_index", "TYPE_INT32"),
    Tensor("sequence_index", "TYPE_INT32"),
    Tensor("num_input_tokens", "TYPE_INT32"),
    Tensor("num_output_tokens", "TYPE_INT32"),
)
