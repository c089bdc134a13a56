"""The families, as a literal table: architecture in config.json -> how to read it."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from trtc.builder.checkpoint.checkpoint import Checkpoint
from trtc.builder.families.config import Config
from trtc.builder.families.gemma2 import gemma2
from trtc.builder.families.llama import llama
from trtc.builder.families.mistral import mistral
from trtc.builder.families.mixtral import mixtral
from trtc.builder.families.phi3 import phi3
from trtc.builder.families.qwen2 import qwen2
from trtc.builder.families.qwen3 import qwen3
from trtc.builder.families.qwen3_moe import qwen3_moe
from trtc.builder.spec import DecoderSpec
from trtc.protos.errors import CheckpointError, RequestError, UnsupportedError

FAMILIES: Mapping[str, Callable[[Config, int], DecoderSpec]] = {
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": mistral,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
    "Gemma2ForCausalLM": gemma2,
    "Phi3ForCausalLM": phi3,
    "Qwen3MoeForCausalLM": qwen3_moe,
    "MixtralForCausalLM": mixtral,
}


def decoder_spec(config: Mapping[str, Any], max_seq_len: int) -> DecoderSpec:
    """What config.json describes.

    Args:
        config: config.json.
        max_seq_len: prompt and completion tokens that the engine is built for.

    Raises:
        UnsupportedError: an architecture, or a feature of a known one, that trtc does not have.
        CheckpointError: a field is missing or wrong.
        RequestError: max_seq_len beyond what the model was made for.
    """
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise CheckpointError(
            "is missing",
            field="config.json: architectures",
            remedy="Add the Transformers class, for example LlamaForCausalLM",
        )
    family = FAMILIES.get(str(architectures[0]))
    if family is None:
        raise UnsupportedError(
            f"{architectures[0]!r} is not supported",
            field="config.json: architectures",
            remedy=f"trtc builds {', '.join(FAMILIES)}",
        )
    spec = family(Config(config), max_seq_len)
    _check_shapes(spec)
    if not 1 <= max_seq_len <= spec.max_position_embeddings:
        raise RequestError(
            f"{max_seq_len} is not between 1 and the model's max_position_embeddings "
            f"{spec.max_position_embeddings}",
            field="--max-seq-len",
            remedy=f"Give at most {spec.max_position_embeddings}",
        )
    return spec


def checkpoint_spec(checkpoint: Checkpoint, max_seq_len: int) -> DecoderSpec:
    """`decoder_spec` of a checkpoint, with the token ids that generation_config.json decides."""
    return dataclasses.replace(
        decoder_spec(checkpoint.config, max_seq_len),
        bos_token_id=checkpoint.token_id("bos_token_id"),
        eos_token_ids=checkpoint.eos_token_ids,
        pad_token_id=checkpoint.token_id("pad_token_id"),
    )


def _check_shapes(spec: DecoderSpec) -> None:
    attention = spec.layers[0].attention
    if attention.num_heads % attention.num_kv_heads:
        raise CheckpointError(
            f"{attention.num_kv_heads} does not divide the {attention.num_heads} heads",
            field="config.json: num_key_value_heads",
        )
