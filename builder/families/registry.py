"""The families, as a literal table: architecture in config.json -> how to read it."""

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from trtc.builder.checkpoint.checkpoint import Checkpoint
from trtc.builder.families.bounds import MAX_EXPERTS_OF_ALL_LAYERS
from trtc.builder.families.cohere import cohere, cohere2
from trtc.builder.families.config import Config, shown
from trtc.builder.families.cwm import cwm
from trtc.builder.families.deepseek import (
    deepseek_v2,
    deepseek_v3,
    deepseek_v32,
    kimi_k25,
    youtu,
)
from trtc.builder.families.ernie4_5_moe import ernie4_5_moe
from trtc.builder.families.exaone4 import exaone4
from trtc.builder.families.gemma2 import gemma2
from trtc.builder.families.gemma3 import gemma3
from trtc.builder.families.gemma4 import gemma4, gemma4_unified
from trtc.builder.families.glm4 import glm, glm4
from trtc.builder.families.glm4_moe import glm4_moe
from trtc.builder.families.glm4_moe_lite import glm4_moe_lite
from trtc.builder.families.glm_moe_dsa import glm_moe_dsa
from trtc.builder.families.gpt_oss import gpt_oss
from trtc.builder.families.granite import granite
from trtc.builder.families.granite_hybrid import granite_moe_hybrid
from trtc.builder.families.granite_moe import granite_moe, granite_moe_shared
from trtc.builder.families.hunyuan import hunyuan_dense, hunyuan_moe
from trtc.builder.families.jamba import jamba
from trtc.builder.families.kimi_linear import kimi_linear
from trtc.builder.families.lfm2 import lfm2, lfm2_moe
from trtc.builder.families.llama import ernie4_5, helium, internlm3, llama, seed_oss
from trtc.builder.families.llama4 import llama4
from trtc.builder.families.minimax_m2 import minimax_m2
from trtc.builder.families.ministral3 import ministral3
from trtc.builder.families.mistral import ministral, mistral
from trtc.builder.families.mistral4 import mistral3, mistral4
from trtc.builder.families.mixtral import mixtral
from trtc.builder.families.nemotron import arcee, nemotron
from trtc.builder.families.nemotron_h import nemotron_h
from trtc.builder.families.olmo2 import olmo2, olmo3
from trtc.builder.families.olmo_hybrid import olmo_hybrid
from trtc.builder.families.olmoe import olmoe
from trtc.builder.families.own import Family
from trtc.builder.families.phi3 import phi3
from trtc.builder.families.phimoe import phimoe
from trtc.builder.families.qwen2 import qwen2
from trtc.builder.families.qwen2_moe import qwen2_moe
from trtc.builder.families.qwen3 import qwen3
from trtc.builder.families.qwen3_moe import qwen3_moe
from trtc.builder.families.qwen3_next import qwen3_5, qwen3_5_moe, qwen3_next
from trtc.builder.families.smollm3 import smollm3
from trtc.builder.families.starcoder2 import stablelm, starcoder2
from trtc.builder.spec import DecoderSpec
from trtc.protos.errors import CheckpointError, RequestError, UnsupportedError

_MAX_NAME = 100
FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": llama,
    "Llama4ForCausalLM": llama4,
    "Llama4ForConditionalGeneration": llama4,
    "MistralForCausalLM": mistral,
    "MinistralForCausalLM": ministral,
    "CwmForCausalLM": cwm,
    "YoutuForCausalLM": youtu,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
    "Gemma2ForCausalLM": gemma2,
    "Gemma3ForCausalLM": gemma3,
    "Gemma3ForConditionalGeneration": gemma3,
    "Gemma4ForCausalLM": gemma4,
    "Gemma4ForConditionalGeneration": gemma4,
    "Gemma4UnifiedForConditionalGeneration": gemma4_unified,
    "Phi3ForCausalLM": phi3,
    "Lfm2ForCausalLM": lfm2,
    "Qwen3MoeForCausalLM": qwen3_moe,
    "Qwen3_5ForCausalLM": qwen3_5,
    "Qwen3_5ForConditionalGeneration": qwen3_5,
    "Qwen3_5MoeForCausalLM": qwen3_5_moe,
    "Qwen3_5MoeForConditionalGeneration": qwen3_5_moe,
    "Qwen3NextForCausalLM": qwen3_next,
    "Qwen2MoeForCausalLM": qwen2_moe,
    "Glm4MoeForCausalLM": glm4_moe,
    "MiniMaxM2ForCausalLM": minimax_m2,
    "Lfm2MoeForCausalLM": lfm2_moe,
    "Ernie4_5_MoeForCausalLM": ernie4_5_moe,
    "GraniteMoeForCausalLM": granite_moe,
    "GraniteMoeSharedForCausalLM": granite_moe_shared,
    "GraniteMoeHybridForCausalLM": granite_moe_hybrid,
    "MixtralForCausalLM": mixtral,
    "JambaForCausalLM": jamba,
    "Ministral3ForCausalLM": ministral3,
    "Mistral3ForConditionalGeneration": mistral3,
    "Mistral4ForCausalLM": mistral4,
    "SmolLM3ForCausalLM": smollm3,
    "Olmo2ForCausalLM": olmo2,
    "Olmo3ForCausalLM": olmo3,
    "OlmoHybridForCausalLM": olmo_hybrid,
    "OlmoeForCausalLM": olmoe,
    "GptOssForCausalLM": gpt_oss,
    "GraniteForCausalLM": granite,
    "GlmForCausalLM": glm,
    "Glm4ForCausalLM": glm4,
    "HeliumForCausalLM": helium,
    "Ernie4_5ForCausalLM": ernie4_5,
    "SeedOssForCausalLM": seed_oss,
    "Exaone4ForCausalLM": exaone4,
    "CohereForCausalLM": cohere,
    "Cohere2ForCausalLM": cohere2,
    "DeepseekV2ForCausalLM": deepseek_v2,
    "DeepseekV3ForCausalLM": deepseek_v3,
    "DeepseekV32ForCausalLM": deepseek_v32,
    "KimiK25ForConditionalGeneration": kimi_k25,
    "Kimi_K25ForConditionalGeneration": kimi_k25,
    "KimiLinearForCausalLM": kimi_linear,
    "Glm4MoeLiteForCausalLM": glm4_moe_lite,
    "GlmMoeDsaForCausalLM": glm_moe_dsa,
    "Starcoder2ForCausalLM": starcoder2,
    "StableLmForCausalLM": stablelm,
    "NemotronForCausalLM": nemotron,
    "NemotronHForCausalLM": nemotron_h,
    "ArceeForCausalLM": arcee,
    "HunYuanDenseV1ForCausalLM": hunyuan_dense,
    "HunYuanMoEV1ForCausalLM": hunyuan_moe,
    "InternLM3ForCausalLM": internlm3,
    "PhiMoEForCausalLM": phimoe,
    "PhimoeForCausalLM": phimoe,
}


def decoder_spec(
    config: Mapping[str, Any], max_seq_len: int, own: Family | None = None
) -> DecoderSpec:
    """What config.json describes.

    Args:
        config: config.json.
        max_seq_len: prompt and completion tokens that the engine is built for.
        own: a family of the user's own; None: the one by the architecture.

    Raises:
        UnsupportedError: an architecture, or a feature of a known one, that trtc does not have.
        CheckpointError: a field is missing or wrong.
        RequestError: max_seq_len beyond what the model was made for.
    """
    family = _by_architecture(config) if own is None else own
    if own is None:
        _check_experts(Config(config))
    spec = family(Config(config), max_seq_len)
    _check_heads(spec)
    if not 1 <= max_seq_len <= spec.max_position_embeddings:
        raise RequestError(
            f"{max_seq_len} is not between 1 and the model's max_position_embeddings "
            f"{spec.max_position_embeddings}",
            field="--max-seq-len",
            remedy=f"Give at most {spec.max_position_embeddings}",
        )
    return spec


def _by_architecture(config: Mapping[str, Any]) -> Family:
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
            f"{shown(architectures[0])} is not supported",
            field="config.json: architectures",
            remedy=_nearest(architectures[0]),
        )
    return family


def _nearest(architecture: object) -> str:
    listed = "`trtc families` lists what trtc builds"
    near = difflib.get_close_matches(str(architecture)[:_MAX_NAME], FAMILIES, n=3)
    return f"{listed}; the nearest are {', '.join(near)}" if near else listed


def checkpoint_spec(
    checkpoint: Checkpoint, max_seq_len: int, own: Family | None = None
) -> DecoderSpec:
    """`decoder_spec` of a checkpoint, with the token ids that generation_config.json decides."""
    return dataclasses.replace(
        decoder_spec(checkpoint.config, max_seq_len, own),
        bos_token_id=checkpoint.token_id("bos_token_id"),
        eos_token_ids=checkpoint.eos_token_ids,
        pad_token_id=checkpoint.token_id("pad_token_id"),
    )


def _check_experts(config: Config) -> None:
    """Each field's bound leaves room for more linears than can be listed."""
    layers = config.integer("num_hidden_layers", 1)
    for key in ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"):
        experts = config.integer(key, 0, least=0)
        if layers * experts > MAX_EXPERTS_OF_ALL_LAYERS:
            raise CheckpointError(
                f"is {experts} in each of {layers} layers, more than "
                f"{MAX_EXPERTS_OF_ALL_LAYERS} together",
                field=f"config.json: {key}",
            )


def _check_heads(spec: DecoderSpec) -> None:
    """Each layer's heads share its KV heads equally."""
    for index, attention in spec.attentions:
        if attention.num_heads % attention.num_kv_heads:
            raise CheckpointError(
                f"{attention.num_kv_heads} does not divide the {attention.num_heads} heads "
                f"of layer {index}",
                field="config.json: num_key_value_heads",
            )
