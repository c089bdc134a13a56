"""Tiny random checkpoints of every family, saved by Transformers, which is also the oracle.

The configs are small but none of their features sleeps: windows are shorter than the prompts,
softcaps bite, rope scaling changes the angles, biases and norm weights are random (Transformers
starts them at zero and one, which hides a forgotten one).
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

VOCAB_SIZE = 160
MAX_SEQ_LEN = 256
WINDOW = 20

_BASE: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_SEQ_LEN,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_PHI3_LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0],
}
PHIMOE_ROPE = {
    **_PHI3_LONG_ROPE,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 9.0],
    "original_max_position_embeddings": 128,
    "short_mscale": 1.2,
    "long_mscale": 1.2,
}

_LATENT: Mapping[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 40,
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}
_LATENT_EXPERTS: Mapping[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 32,
}
_INDEXER: Mapping[str, Any] = {"index_n_heads": 16, "index_head_dim": 24, "index_topk": 11}
LATENT_YARN: Mapping[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
}

_CONFIGS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama3": ("LlamaConfig", {"rope_parameters": _LLAMA3_ROPE, "tie_word_embeddings": True}),
    "llama_biased": (
        "LlamaConfig",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        },
    ),
    "llama_yarn": (
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "mistral": ("MistralConfig", {"sliding_window": WINDOW, "head_dim": 24}),
    "qwen2": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 32, "tie_word_embeddings": True}),
    "gemma2": (
        "Gemma2Config",
        {
            "num_hidden_layers": 4,
            "head_dim": 32,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "num_hidden_layers": 6,
            "head_dim": 32,
            "sliding_window": WINDOW,
            "sliding_window_pattern": 3,
            "query_pre_attn_scalar": 24,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
            },
        },
    ),
    "gemma4": (
        "Gemma4TextConfig",
        {
            "num_hidden_layers": 6,
            "head_dim": 16,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": 5.0,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
                "full_attention": {
                    "rope_type": "proportional",
                    "rope_theta": 10000.0,
                    "partial_rotary_factor": 0.5,
                },
            },
        },
    ),
    "gemma4_moe": (
        "Gemma4TextConfig",
        {
            "num_hidden_layers": 2,
            "head_dim": 16,
            "global_head_dim": 32,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
    ),
    "gemma4_e": (
        "Gemma4TextConfig",
        {
            "num_hidden_layers": 7,
            "head_dim": 16,
            "global_head_dim": 32,
            "sliding_window": WINDOW,
            "layer_types": [
                *("sliding_attention", "full_attention", "sliding_attention", "full_attention"),
                *("sliding_attention", "sliding_attention", "full_attention"),
            ],
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB_SIZE + 2,
        },
    ),
    "phi3": ("Phi3Config", {"sliding_window": WINDOW}),
    "phi3_longrope": (
        "Phi3Config",
        {
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 32,
            "rope_parameters": _PHI3_LONG_ROPE,
        },
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            "head_dim": 32,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
            "num_hidden_layers": 3,
        },
    ),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 1,
            "decoder_sparse_step": 2,
            "num_hidden_layers": 3,
            "mlp_only_layers": [],
        },
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        {
            "head_dim": 32,
            "num_hidden_layers": 3,
            "first_k_dense_replace": 1,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "attention_bias": True,
            "use_qk_norm": True,
        },
    ),
    "minimax_m2": (
        "MiniMaxM2Config",
        {
            "head_dim": 32,
            "intermediate_size": 32,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "rotary_dim": 16,
        },
    ),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        {
            "num_hidden_layers": 4,
            "moe_intermediate_size": 32,
            "moe_num_experts": 6,
            "moe_k": 2,
            "moe_layer_end_index": 2,
        },
    ),
    "granite_moe": (
        "GraniteMoeConfig",
        {
            "intermediate_size": 32,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.1,
            "logits_scaling": 0.3,
        },
    ),
    "granite_moe_shared": (
        "GraniteMoeSharedConfig",
        {
            "intermediate_size": 32,
            "shared_intermediate_size": 48,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "attention_multiplier": 0.25,
        },
    ),
    "jamba": (
        "JambaConfig",
        {
            "num_hidden_layers": 4,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "mamba_d_state": 8,
            "mamba_dt_rank": 6,
            "mamba_proj_bias": True,
            "pad_token_id": 0,
        },
    ),
    "nemotron_h": (
        "NemotronHConfig",
        {
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
            "num_hidden_layers": ...,
            "head_dim": 24,
            "mamba_num_heads": 8,
            "mamba_head_dim": 24,
            "n_groups": 2,
            "ssm_state_size": 16,
            "chunk_size": 8,
            "time_step_min": 1e-9,
            "mlp_bias": True,
            "use_bias": True,
        },
    ),
    "nemotron_h_moe": (
        "NemotronHConfig",
        {
            "layers_block_type": ["moe", "linear_attention", "moe", "full_attention"],
            "num_hidden_layers": ...,
            "head_dim": 24,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "n_groups": 1,
            "ssm_state_size": 16,
            "chunk_size": 8,
            "time_step_min": 1e-9,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "moe_shared_expert_intermediate_size": 48,
            "moe_latent_size": 32,
            "routed_scaling_factor": 1.5,
        },
    ),
    "granite_moe_hybrid": (
        "GraniteMoeHybridConfig",
        {
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "intermediate_size": 32,
            "shared_intermediate_size": 48,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "mamba_n_heads": 8,
            "mamba_d_state": 24,
            "mamba_chunk_size": 8,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.1,
            "logits_scaling": 0.3,
        },
    ),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        {
            "num_hidden_layers": 4,
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "routed_scaling_factor": 1.5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        },
    ),
    "lfm2": (
        "Lfm2Config",
        {
            "num_hidden_layers": 5,
            "layer_types": ["conv", "full_attention", "conv", "conv", "full_attention"],
            "block_multiple_of": 32,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        },
    ),
    "qwen3_5": (
        "Qwen3_5TextConfig",
        {
            "num_hidden_layers": 4,
            "head_dim": 32,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 24,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "layer_types": ["linear_attention", "full_attention", *2 * ["linear_attention"]],
        },
    ),
    "qwen3_5_moe": (
        "Qwen3_5MoeTextConfig",
        {
            "num_hidden_layers": 2,
            "head_dim": 32,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 24,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "layer_types": ["linear_attention", "full_attention"],
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
        },
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            "num_hidden_layers": 4,
            "head_dim": 32,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 24,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "full_attention_interval": 2,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
            "mlp_only_layers": [1],
        },
    ),
    "kimi_linear": (
        "KimiLinearConfig",
        {
            **_LATENT,
            **_LATENT_EXPERTS,
            "num_hidden_layers": 3,
            "q_lora_rank": None,
            "n_routed_experts": ...,
            "num_local_experts": _LATENT_EXPERTS["n_routed_experts"],
            "linear_head_dim": 16,
            "linear_num_heads": 4,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "n_group": 4,
            "topk_group": 2,
        },
    ),
    "mixtral": (
        "MixtralConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW},
    ),
    "ministral": (
        "MinistralConfig",
        {
            "head_dim": 24,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "cwm": (
        "CwmConfig",
        {"head_dim": 24, "sliding_window": WINDOW, "rope_parameters": _LLAMA3_ROPE},
    ),
    # Transformers makes the embedding of its padding zero, whatever the checkpoint has.
    "youtu": ("YoutuConfig", {**_LATENT, "pad_token_id": ..., "tie_word_embeddings": True}),
    "ministral3": (
        "Ministral3Config",
        {
            "head_dim": 24,
            "max_position_embeddings": 128,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.5,
            },
        },
    ),
    "smollm3": (
        "SmolLM3Config",
        {
            "num_hidden_layers": 4,
            "no_rope_layers": [1, 0, 1, 0],
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        },
    ),
    "olmo2": ("Olmo2Config", {"attention_bias": True}),
    "olmo3": (
        "Olmo3Config",
        {
            "num_hidden_layers": 4,
            "sliding_window": WINDOW,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 1000.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                },
            },
        },
    ),
    "olmo_hybrid": (
        "OlmoHybridConfig",
        {
            "num_hidden_layers": 4,
            "linear_key_head_dim": 24,
            "linear_value_head_dim": 48,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "layer_types": ["linear_attention", "full_attention", *2 * ["linear_attention"]],
            "attention_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        },
    ),
    "olmo_hybrid_nope": (
        "OlmoHybridConfig",
        {
            "num_hidden_layers": 2,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 4,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_allow_neg_eigval": False,
            "rope_parameters": {"rope_theta": None},
        },
    ),
    "olmoe": (
        "OlmoeConfig",
        {"num_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 32},
    ),
    "llama4": (
        "Llama4TextConfig",
        {
            "num_hidden_layers": 4,
            "head_dim": 32,
            "intermediate_size": 48,
            "intermediate_size_mlp": 80,
            "num_local_experts": 5,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": WINDOW,
            "no_rope_layer_interval": 3,
            "floor_scale": 16,
            "attn_scale": 0.7,
            "rope_parameters": _LLAMA3_ROPE,
        },
    ),
    "llama4_scout": (
        "Llama4TextConfig",
        {
            "num_hidden_layers": 2,
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "moe_layers": [0],
            "attention_chunk_size": WINDOW,
            "no_rope_layers": [1, 0],
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            "attention_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            "num_hidden_layers": 3,
            "head_dim": 16,
            "sliding_window": WINDOW,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "swiglu_limit": 1.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "beta_fast": 8.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "granite": (
        "GraniteConfig",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.1,
            "logits_scaling": 0.3,
            "tie_word_embeddings": True,
        },
    ),
    "glm": ("GlmConfig", {"head_dim": 24}),
    "glm4": ("Glm4Config", {"head_dim": 24}),
    "helium": ("HeliumConfig", {"head_dim": 16}),
    "ernie4_5": ("Ernie4_5Config", {"head_dim": 32, "use_bias": True}),
    "seed_oss": ("SeedOssConfig", {"head_dim": 32, "attention_out_bias": True}),
    "phimoe": (
        "PhimoeConfig",
        {
            "num_local_experts": 6,
            "router_jitter_noise": 0.3,
            "attention_bias": True,
            "lm_head_bias": True,
            "sliding_window": WINDOW,
            "original_max_position_embeddings": 128,
            "rope_parameters": PHIMOE_ROPE,
        },
    ),
    "hunyuan_dense": (
        "HunYuanDenseV1Config",
        {
            "head_dim": 32,
            "attention_bias": True,
            "rope_parameters": {"rope_type": "dynamic", "factor": 1.0, "alpha": 50.0},
        },
    ),
    "hunyuan_moe": (
        "HunYuanMoEV1Config",
        {"head_dim": 32, "num_experts": 6, "moe_topk": [2, 3], "intermediate_size": 32},
    ),
    "cohere": ("CohereConfig", {"logit_scale": 0.3, "attention_bias": True}),
    "cohere2": (
        "Cohere2Config",
        {
            "num_hidden_layers": 4,
            "logit_scale": 0.25,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "starcoder2": ("Starcoder2Config", {"sliding_window": WINDOW}),
    "stablelm": ("StableLmConfig", {"use_qkv_bias": True, "partial_rotary_factor": 0.5}),
    "stablelm_parallel": ("StableLmConfig", {"use_parallel_residual": True}),
    "nemotron": ("NemotronConfig", {"mlp_bias": True}),
    "arcee": ("ArceeConfig", {}),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            **_LATENT,
            **_LATENT_EXPERTS,
            "first_k_dense_replace": 1,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "rope_parameters": LATENT_YARN,
            "attention_bias": True,
        },
    ),
    "deepseek_v32": (
        "DeepseekV32Config",
        {
            **_LATENT,
            **_LATENT_EXPERTS,
            **_INDEXER,
            "first_k_dense_replace": 1,
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": LATENT_YARN,
            "attention_bias": True,
        },
    ),
    "glm_moe_dsa": (
        "GlmMoeDsaConfig",
        {
            **_LATENT,
            **_LATENT_EXPERTS,
            **_INDEXER,
            "num_hidden_layers": 4,
            "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
            "indexer_types": ["full", "shared", "full", "shared"],
        },
    ),
    "deepseek_v2": (
        "DeepseekV2Config",
        {
            **_LATENT,
            **_LATENT_EXPERTS,
            "first_k_dense_replace": 1,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 4.0,
            "rope_parameters": {**LATENT_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "deepseek_v2_lite": (
        "DeepseekV2Config",
        {**_LATENT, **_LATENT_EXPERTS, "q_lora_rank": None, "first_k_dense_replace": 1},
    ),
    "glm4_moe_lite": (
        "Glm4MoeLiteConfig",
        {**_LATENT, **_LATENT_EXPERTS, "mlp_layer_types": ["sparse", "dense"]},
    ),
    "mistral4": (
        "Mistral4Config",
        {
            **_LATENT,
            **_LATENT_EXPERTS,
            "q_lora_rank": None,
            "rope_parameters": {
                **LATENT_YARN,
                "original_max_position_embeddings": 32,
                "llama_4_scaling_beta": 0.5,
            },
        },
    ),
    "exaone4": (
        "Exaone4Config",
        {"num_hidden_layers": 4, "sliding_window": WINDOW, "sliding_window_pattern": 2},
    ),
}

FAMILIES: tuple[str, ...] = tuple(_CONFIGS)
"""Every variant that `tiny_checkpoint` can make."""


_ZERO_CENTERED = ("gemma2", "gemma3", "nemotron", "qwen3_5", "qwen3_next")
"""Variants whose norms add 1 to their weights."""


def tiny_config(family: str, **overrides: Any) -> Any:
    """The variant's Transformers config; `overrides` are its fields by their Transformers names."""
    class_name, fields = _CONFIGS[family]
    merged = {**_BASE, **fields, **overrides}
    # Transformers writes into the rope dictionary that it is given.
    merged = {
        key: dict(v) if isinstance(v, dict) else v for key, v in merged.items() if v is not ...
    }
    return getattr(transformers, class_name)(**merged)


def architecture_of(family: str) -> str:
    """What the variant's config.json has as its architecture."""
    class_name, _ = _CONFIGS[family]
    kind = getattr(transformers, class_name).__name__
    return kind.removesuffix("Config").removesuffix("Text") + "ForCausalLM"


def tiny_checkpoint(
    family: str,
    directory: Path,
    dtype: str = "float32",
    *,
    seed: int = 0,
    max_shard_size: str = "1GB",
    **overrides: Any,
) -> Path:
    """Save a random model of `family` under `directory` and return its path.

    The same arguments give the same weights. `dtype` is a torch name; `max_shard_size` as small as
    "40KB" gives a sharded checkpoint; `overrides` are config fields.
    """
    torch.manual_seed(seed)
    model = getattr(transformers, architecture_of(family))._from_config(
        tiny_config(family, **overrides)
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_random_like(name, parameter, family))
        for name, buffer in model.named_buffers():
            if name.endswith(("bias", "layer_scalar")):  # of routers; Gemma 4's
                buffer.copy_(_random_like(name, buffer, family))
    path = directory / family
    model.to(getattr(torch, dtype)).save_pretrained(path, max_shard_size=max_shard_size)
    return path


def _random_like(name: str, parameter: torch.Tensor, family: str) -> torch.Tensor:
    noise = torch.randn(parameter.shape, dtype=torch.float32)
    if name.endswith("bias"):
        return 0.3 * noise
    if name.endswith("A_log"):
        return 0.5 * noise - 2.0  # states are remembered for some tens of tokens
    if parameter.dim() == 3 and family.startswith(("gpt_oss", "llama4")):
        # [experts, columns, rows].
        return float(1.5 / np.sqrt(parameter.shape[1])) * noise
    if parameter.dim() == 1:
        is_zero = family.startswith(_ZERO_CENTERED) and not name.endswith("linear_attn.norm.weight")
        return 0.2 * noise + (0.0 if is_zero else 1.0)
    if "embed_tokens" in name:
        # Small, or a tied model would do nothing but repeat its last token.
        return 0.12 * noise
    # Keeps activations near 1 and logits far enough apart that greedy choices have a margin.
    return float(1.5 / np.sqrt(parameter.shape[-1])) * noise


def random_prompt(length: int, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> list[int]:
    """`length` token ids, none of them special."""
    return [int(i) for i in np.random.default_rng(seed).integers(3, vocab_size, length)]


def transformers_model(path: Path, dtype: str = "float32") -> Any:
    """The checkpoint as a Transformers model for inference (eager attention: softcaps are kept)."""
    architecture = transformers.AutoConfig.from_pretrained(path).architectures[0]
    model = getattr(transformers, architecture).from_pretrained(
        path, dtype=getattr(torch, dtype), attn_implementation="eager"
    )
    return model.eval()


@lru_cache(maxsize=1)
def _model_as_it_is(path: Path, dtype: str, files: tuple[tuple[str, int, int], ...]) -> Any:
    return transformers_model(path, dtype)


def _oracle(path: Path, dtype: str = "float32") -> Any:
    """As `transformers_model`, which nobody changes; read once for calls that follow each other."""
    files = sorted((one.name, one.stat()) for one in path.iterdir())
    return _model_as_it_is(
        path, dtype, tuple((name, stat.st_mtime_ns, stat.st_size) for name, stat in files)
    )


def transformers_logits(
    path: Path, ids: Sequence[int], dtype: str = "float32"
) -> NDArray[np.float32]:
    """Logits [len(ids), vocab] of one sequence."""
    model = _oracle(path, dtype)
    with torch.no_grad():
        logits = model(torch.tensor([list(ids)])).logits[0]
    result: NDArray[np.float32] = logits.float().numpy()
    return result


def transformers_choices(path: Path, ids: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """The most likely token after `ids` and each beginning of `tokens`, as many as `tokens`.

    They equal `tokens` if and only if these are the greedy continuation of `ids`; this takes one
    forward pass, two where longrope changes its factors, and not one a token.
    """
    model = _oracle(path)
    switch = getattr(model.config, "original_max_position_embeddings", None)
    whole = [*ids, *tokens][:-1]
    ends = [len(whole)]
    if switch is not None and len(ids) <= switch < len(whole):
        ends.insert(0, switch)
    found: list[int] = []
    with torch.no_grad():
        for end in ends:
            logits = model(torch.tensor([whole[:end]])).logits[0]
            found += logits[len(ids) - 1 + len(found) :].argmax(-1).tolist()
    return found


def assert_greedy(path: Path, ids: Sequence[int], tokens: Sequence[int], count: int) -> None:
    """`tokens` are `count` after `ids`, each of which Transformers chooses after those before."""
    assert len(tokens) == count
    assert list(tokens) == transformers_choices(path, ids, tokens)
