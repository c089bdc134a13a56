"""Quantised engines against the evaluator on the graph that they ship."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.engines import NUM_PAGES, compile_dummy, engine_stepper
from tests.support.models import random_prompt
from tests.support.steps import Stepper
from trtc.quant.scheme import SCHEMES

MAX_ERROR = 0.05
RMS_ERROR = 0.005
"""Of logits with a standard deviation of 0.23. Sums in another order round a bf16 activation the
other way now and then; nothing else may differ, and most engines here are equal bit for bit."""
LLAMA: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256}
FIELDS: dict[str, dict[str, Any]] = {
    # Its second layer is dense, as those of llama are.
    "qwen3_moe": {**LLAMA, "moe_intermediate_size": 128},
    "qwen3_5": {
        **LLAMA,
        "linear_value_head_dim": 32,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "qwen3_next": {
        **LLAMA,
        "linear_value_head_dim": 32,
        "num_hidden_layers": 2,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
        "mlp_only_layers": [],
    },
    "kimi_linear": {
        **LLAMA,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "linear_head_dim": 32,
        "moe_intermediate_size": 128,
        "kv_lora_rank": 128,
    },
    "olmo_hybrid": {
        **LLAMA,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 64,
    },
    "deepseek_v3": {
        **LLAMA,
        "moe_intermediate_size": 128,
        "q_lora_rank": 128,
        "kv_lora_rank": 128,
    },
    "deepseek_v32": {
        **LLAMA,
        "moe_intermediate_size": 128,
        "q_lora_rank": 128,
        "kv_lora_rank": 128,
    },
    "granite_moe_hybrid": {
        **LLAMA,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "shared_intermediate_size": 128,
        "num_local_experts": 0,
    },
    "lfm2": {**LLAMA, "block_auto_adjust_ff_dim": False},
}


@pytest.mark.parametrize(
    ("family", "scheme", "kv_dtype", "exact_activations"),
    [
        ("llama", "bf16", "f8e4m3", False),
        ("llama", "bf16", "i8", False),
        ("llama", "bf16", "i4", False),
        ("llama", "int4_awq", None, True),
        ("lfm2", "int4_awq", None, False),
        ("deepseek_v3", "fp8", "f8e4m3", False),
        ("deepseek_v32", "fp8", "f8e4m3", False),
        ("qwen3_5", "int4_awq", None, False),
        ("qwen3_next", "fp8", None, False),
        ("kimi_linear", "int4_awq", None, False),
        ("olmo_hybrid", "fp8", "f8e4m3", False),
        ("granite_moe_hybrid", "int4_awq", None, False),
        ("qwen3_moe", "fp8", "f8e4m3", False),
        ("qwen3_moe", "fp8", "f8e4m3", True),
        ("qwen3_moe", "int8_sq", None, False),
        ("qwen3_moe", "int8_hadamard", None, False),
        ("qwen3_moe", "int4_awq", None, False),
        ("qwen3_moe", "iq4", None, False),
        ("qwen3_moe", "int6_g128", None, False),
        ("llama", "int6_g128", None, True),
        ("qwen3_moe", "w4a8_awq", None, False),
        ("qwen3_moe", "w4a8_awq", None, True),
    ],
)
def test_engine_equals_the_evaluator(
    tmp_path: Path, family: str, scheme: str, kv_dtype: str | None, exact_activations: bool
) -> None:
    compiled = compile_dummy(
        family,
        SCHEMES[scheme],
        tmp_path,
        kv_dtype=kv_dtype,
        exact_activations=exact_activations,
        **FIELDS.get(family, LLAMA),
    )
    prompt = random_prompt(53, seed=3)
    found = engine_stepper(compiled.executor).prefill(prompt, 23)
    oracle = Stepper(compiled.evaluator.run, compiled.kv, NUM_PAGES, scramble=1)
    expected = oracle.prefill(prompt, 23)
    assert 0.1 < expected.std() < 1
    assert np.abs(found - expected).max() < MAX_ERROR
    assert np.sqrt(np.mean((found - expected) ** 2)) < RMS_ERROR
    # And bit for bit against itself, whatever the chunks: decode and prefill kernels agree.
    for chunk in (1, 8, 53):
        again = engine_stepper(compiled.executor).prefill(prompt, chunk)
        np.testing.assert_array_equal(again, found)
    compiled.executor.close()
