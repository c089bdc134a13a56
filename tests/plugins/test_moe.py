"""Routed experts: the kernel against its reference, the reference against Transformers."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GptOssConfig, MixtralConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from tests.support.kernels import (
    KernelCall,
    KernelLibrary,
    assert_close,
    available_isas,
    compile_kernels,
)
from tests.support.moe_calls import CASES, EXPERTS, ROWS, moe_call, take_rows, with_experts
from tests.support.weights import in_memory
from trtc.plugins.moe.op import MOE

CALLS = [moe_call(np.random.default_rng(60 + i), case) for i, case in enumerate(CASES)]
IDS = [str(case) for case in CASES]


@pytest.fixture(scope="module", params=available_isas())
def library(request: pytest.FixtureRequest) -> KernelLibrary:
    return compile_kernels([in_memory(call) for call in CALLS], request.param)


@pytest.mark.parametrize("call", CALLS, ids=IDS)
def test_kernel_agrees_with_reference(library, call):
    assert_close(call, library.run(in_memory(call), num_threads=2))


@pytest.mark.parametrize("call", CALLS, ids=IDS)
def test_a_row_does_not_depend_on_the_others_nor_on_threads(library, call):
    call = in_memory(call)
    whole = library.run(call, num_threads=1)["out"]
    assert library.run(call, num_threads=3)["out"].tobytes() == whole.tobytes()
    for rows in (slice(7, 8), slice(3, 5), slice(20, 37), slice(None, None, -1)):
        some = library.run(take_rows(call, rows), num_threads=2)["out"]
        assert some.tobytes() == np.ascontiguousarray(whole[rows]).tobytes()


def test_many_rows_go_in_chunks(library):
    call = take_rows(CALLS[0], np.arange(300) % ROWS)
    once = library.run(CALLS[0])["out"]
    assert (
        library.run(call, num_threads=2)["out"].tobytes() == once[np.arange(300) % ROWS].tobytes()
    )


def test_all_rows_may_choose_one_expert(library):
    """One expert gets every row and the others none."""
    call = next(c for c, case in zip(CALLS, CASES, strict=True) if case.top_k == 1)
    logits = np.zeros((ROWS, EXPERTS), np.float32)
    logits[:, 3] = 5
    call = replace(call, inputs={**call.inputs, "router_logits": logits})
    assert_close(call, library.run(in_memory(call), num_threads=2))


def test_equal_logits_choose_the_lower_experts(library):
    call = replace(
        CALLS[0],
        inputs={**CALLS[0].inputs, "router_logits": np.zeros((ROWS, EXPERTS), np.float32)},
    )
    assert_close(call, library.run(call))


def experts_of(block: torch.nn.Module) -> dict[str, np.ndarray]:
    """A Transformers block's weights in the operator's spelling."""
    experts: Any = block.experts
    return {
        "gate_up": experts.gate_up_proj.detach().numpy(),
        "down": experts.down_proj.detach().numpy(),
    }


def test_the_sums_of_ranks_with_some_of_the_experts_are_the_whole():
    case = next(case for case in CASES if case.router == "groups")
    call = moe_call(np.random.default_rng(7), replace(case, layout="row_major", residual=False))
    ranks = [range(2), range(2, 3), range(3, case.experts)]
    sums = sum(with_experts(call, here).reference()["out"] for here in ranks)
    np.testing.assert_allclose(
        sums, call.reference()["out"], rtol=0, atol=1e-5 * np.abs(sums).max()
    )


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_moe_unnormalised", "mixtral"])
def test_reference_is_what_transformers_computes(family):
    torch.manual_seed(4)
    sizes = {"hidden_size": 24, "num_experts_per_tok": 3}
    renormalize = family != "qwen3_moe_unnormalised"
    block: Any
    if family == "mixtral":
        block = MixtralSparseMoeBlock(
            MixtralConfig(intermediate_size=20, num_local_experts=6, **sizes)
        )
    else:
        block = Qwen3MoeSparseMoeBlock(
            Qwen3MoeConfig(
                moe_intermediate_size=20, num_experts=6, norm_topk_prob=renormalize, **sizes
            )
        )
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(1, 7, 24)
    with torch.no_grad():
        expected = block(x)
        logits = x[0] @ block.gate.weight.T
    expected = expected[0] if isinstance(expected, tuple) else expected
    call = KernelCall(
        MOE,
        {
            "I": 20,
            "top_k": 3,
            "renormalize": int(renormalize),
            "activation": "silu",
            "weight_dtype": "f32",
            "out_dtype": "f32",
        },
        {"x": x[0].numpy(), "router_logits": logits.numpy(), **experts_of(block)},
    )
    np.testing.assert_allclose(call.reference()["out"], expected[0].numpy(), atol=1e-5)


def test_clamped_and_biased_experts_are_those_of_gpt_oss():
    torch.manual_seed(5)
    config = GptOssConfig(
        hidden_size=24, intermediate_size=20, num_local_experts=6, num_experts_per_tok=3
    )
    block = GptOssMLP(config)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=2.0)
    x = torch.randn(1, 7, 24)
    experts = {name: one.detach().numpy() for name, one in block.experts.named_parameters()}
    with torch.no_grad():
        expected = block(x)[0][0].numpy()
        logits = x[0] @ block.router.weight.T + block.router.bias
        gate_up = x[0] @ block.experts.gate_up_proj[0]
    assert (gate_up.abs() > config.swiglu_limit).float().mean() > 0.2

    def in_halves(array: np.ndarray) -> np.ndarray:
        """Gate and up of a channel are neighbours."""
        return np.concatenate([array[..., ::2], array[..., 1::2]], axis=-1)

    call = KernelCall(
        MOE,
        {
            "I": 20,
            "top_k": 3,
            "renormalize": 1,
            "activation": "quick_gelu",
            "limit": config.swiglu_limit,
            "up_offset": 1.0,
            "weight_dtype": "f32",
            "out_dtype": "f32",
        },
        {
            "x": x[0].numpy(),
            "router_logits": logits.numpy(),
            "gate_up": in_halves(experts["gate_up_proj"]).transpose(0, 2, 1),
            "down": experts["down_proj"].transpose(0, 2, 1),
            "gate_up_bias": in_halves(experts["gate_up_proj_bias"]),
            "down_bias": experts["down_proj_bias"],
        },
    )
    np.testing.assert_allclose(call.reference()["out"], expected, rtol=1e-5, atol=1e-3)
