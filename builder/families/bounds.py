"""The range of every number of config.json: beyond it no model of today lies, and no build ends.

The largest published models stay at least a factor of four below each upper bound.
"""

from collections.abc import Mapping

MAX_COUNT = 2**31 - 1
"""Of fields that the table does not name: tokens and positions are int32."""
MAX_EXPERTS_OF_ALL_LAYERS = 1 << 17
LATENT_MULTIPLE = 8
"""Kernels read the cached elements of a token so many at a time."""
INTEGERS: Mapping[str, int] = {
    "num_hidden_layers": 1 << 10,
    "hidden_size": 1 << 17,
    "intermediate_size": 1 << 20,
    "moe_intermediate_size": 1 << 20,
    "shared_expert_intermediate_size": 1 << 20,
    "shared_intermediate_size": 1 << 20,
    "moe_shared_expert_intermediate_size": 1 << 20,
    "moe_latent_size": 1 << 17,
    "num_attention_heads": 1 << 12,
    "num_key_value_heads": 1 << 12,
    "num_global_key_value_heads": 1 << 12,
    "num_kv_shared_layers": 1 << 10,
    "hidden_size_per_layer_input": 1 << 13,
    "vocab_size_per_layer_input": 1 << 22,
    "head_dim": 1 << 13,
    "global_head_dim": 1 << 13,
    "q_lora_rank": 1 << 15,
    "kv_lora_rank": 1 << 13,
    "qk_nope_head_dim": 1 << 12,
    "qk_rope_head_dim": 1 << 12,
    "v_head_dim": 1 << 13,
    "vocab_size": 1 << 22,
    "num_local_experts": 1 << 12,
    "num_experts": 1 << 12,
    "num_experts_per_tok": 1 << 12,
    "n_routed_experts": 1 << 12,
    "moe_num_experts": 1 << 12,
    "moe_k": 1 << 12,
    "n_shared_experts": 1 << 6,
    "moe_num_shared_experts": 1 << 6,
    "n_group": 1 << 12,
    "topk_group": 1 << 12,
    "block_ff_dim": 1 << 20,
    "block_multiple_of": 1 << 16,
    "conv_L_cache": 1 << 6,
    "full_attention_interval": 1 << 10,
    "linear_conv_kernel_dim": 1 << 6,
    "linear_key_head_dim": 1 << 9,
    "linear_value_head_dim": 1 << 9,
    "linear_num_key_heads": 1 << 12,
    "linear_num_value_heads": 1 << 12,
    "mamba_n_heads": 1 << 12,
    "mamba_num_heads": 1 << 12,
    "mamba_head_dim": 1 << 9,
    "n_groups": 1 << 12,
    "ssm_state_size": 1 << 9,
    "conv_kernel": 1 << 6,
    "mamba_n_groups": 1 << 12,
    "mamba_d_head": 1 << 9,
    "mamba_d_state": 1 << 9,
    "mamba_d_conv": 1 << 6,
    "mamba_expand": 1 << 6,
}
"""Upper bound by name; the lower one is 1."""
NUMBERS: Mapping[str, tuple[float, float]] = {
    "rms_norm_eps": (0.0, 1.0),
    "norm_eps": (0.0, 1.0),
    "norm_epsilon": (0.0, 1.0),
    "layer_norm_eps": (0.0, 1.0),
    "layer_norm_epsilon": (0.0, 1.0),
    "logit_scale": (1e-6, 1e6),
    "block_ffn_dim_multiplier": (1e-3, 1e3),
    "routed_scaling_factor": (1e-6, 1e6),
    "moe_norm_min": (0.0, 1e-6),
    "rope_theta": (1.001, 1e15),
    "partial_rotary_factor": (1e-3, 1.0),
    "factor": (1e-3, 1e6),
    "low_freq_factor": (1e-6, 1e6),
    "high_freq_factor": (1e-6, 1e6),
    "beta_fast": (1e-6, 1e9),
    "beta_slow": (1e-6, 1e9),
    "attention_factor": (1e-6, 1e6),
    "mscale": (0.0, 1e6),
    "mscale_all_dim": (0.0, 1e6),
    "llama_4_scaling_beta": (0.0, 1e6),
    "embedding_multiplier": (1e-6, 1e6),
    "residual_multiplier": (1e-6, 1e6),
    "attention_multiplier": (1e-6, 1e6),
    "logits_scaling": (1e-6, 1e6),
    "query_pre_attn_scalar": (1e-3, 1e9),
    "attn_logit_softcapping": (1e-3, 1e9),
    "final_logit_softcapping": (1e-3, 1e9),
    "swiglu_limit": (1e-3, 1e6),
}
"""(lower, upper) bound by name, both included."""
ANY_NUMBER = (-1e30, 1e30)
