"""plugins/moe/routing.py against the routers of Transformers."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.deepseek_v2.configuration_deepseek_v2 import DeepseekV2Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.ernie4_5_moe.configuration_ernie4_5_moe import Ernie4_5_MoeConfig
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeTopKRouter
from transformers.models.glm4_moe.configuration_glm4_moe import Glm4MoeConfig
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.granitemoe.configuration_granitemoe import GraniteMoeConfig
from transformers.models.granitemoe.modeling_granitemoe import GraniteMoeTopKRouter
from transformers.models.lfm2_moe.configuration_lfm2_moe import Lfm2MoeConfig
from transformers.models.lfm2_moe.modeling_lfm2_moe import Lfm2MoeTopKRouter
from transformers.models.minimax_m2.configuration_minimax_m2 import MiniMaxM2Config
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2TopKRouter
from transformers.models.phimoe.configuration_phimoe import PhimoeConfig
from transformers.models.phimoe.modeling_phimoe import PhimoeTopKRouter
from transformers.models.qwen2_moe.configuration_qwen2_moe import Qwen2MoeConfig
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter

from trtc.plugins.moe.routing import Routing, route

ROWS, HIDDEN, EXPERTS, TOP_K = 64, 16, 12, 4
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_attention_heads": 2,
    "num_experts_per_tok": TOP_K,
}
GROUPS: dict[str, Any] = {"n_group": 3, "topk_group": 2, "routed_scaling_factor": 2.5}


def chosen(router: torch.nn.Module, *more: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Rows, random logits of theirs, and the weight [rows, E] that the router gives each expert."""
    torch.manual_seed(5)
    for parameter in router.parameters():
        torch.nn.init.normal_(parameter, std=0.6)
    x = torch.randn(ROWS, HIDDEN)
    with torch.no_grad():
        logits, weights, experts = router(x, *more)
    dense = np.zeros((ROWS, EXPERTS), np.float32)
    np.put_along_axis(dense, experts.numpy(), weights.float().numpy(), axis=1)
    return logits.numpy(), dense


def assert_same(
    logits: np.ndarray, expected: np.ndarray, routing: Routing, bias: np.ndarray | None = None
) -> None:
    experts, weights = route(logits, bias, routing)
    found = np.zeros_like(expected)
    np.put_along_axis(found, experts, weights, axis=1)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)


def bias_of(seed: int = 3) -> torch.Tensor:
    """Large enough to change most choices."""
    return torch.from_numpy(
        np.random.default_rng(seed).uniform(-0.6, 0.6, EXPERTS).astype(np.float32)
    )


@pytest.mark.parametrize("renormalize", [False, True])
def test_qwen2_moe(renormalize: bool) -> None:
    router = Qwen2MoeTopKRouter(
        Qwen2MoeConfig(num_experts=EXPERTS, norm_topk_prob=renormalize, **SIZES)
    )
    assert_same(*chosen(router), Routing(TOP_K, renormalize=renormalize))


@pytest.mark.parametrize("kind", ["glm4_moe", "deepseek_v3"])
@pytest.mark.parametrize("renormalize", [False, True])
def test_sigmoid_in_groups_with_a_bias(kind: str, renormalize: bool) -> None:
    fields = {**SIZES, **GROUPS, "n_routed_experts": EXPERTS, "norm_topk_prob": renormalize}
    router: Any = (
        Glm4MoeTopkRouter(Glm4MoeConfig(**fields))
        if kind == "glm4_moe"
        else DeepseekV3TopkRouter(DeepseekV3Config(**fields))
    )
    router.e_score_correction_bias.copy_(bias_of())
    routing = Routing(
        TOP_K,
        score="sigmoid",
        num_groups=3,
        top_groups=2,
        renormalize=renormalize,
        epsilon=1e-20,
        scale=2.5,
    )
    assert_same(*chosen(router), routing, bias_of().numpy())


def test_deepseek_v2_in_groups_by_their_largest_score() -> None:
    config = DeepseekV2Config(
        n_routed_experts=EXPERTS,
        topk_method="group_limited_greedy",
        **SIZES,
        **GROUPS,
    )
    routing = Routing(
        TOP_K, num_groups=3, top_groups=2, group_score="max", renormalize=False, scale=2.5
    )
    assert_same(*chosen(DeepseekV2TopkRouter(config)), routing)


def test_minimax_m2() -> None:
    router = MiniMaxM2TopKRouter(MiniMaxM2Config(num_local_experts=EXPERTS, **SIZES))
    assert_same(*chosen(router, bias_of()), Routing(TOP_K, score="sigmoid"), bias_of().numpy())


@pytest.mark.parametrize("biased", [False, True])
def test_lfm2_moe(biased: bool) -> None:
    config = Lfm2MoeConfig(
        num_experts=EXPERTS, use_expert_bias=biased, routed_scaling_factor=1.5, **SIZES
    )
    routing = Routing(TOP_K, score="sigmoid", epsilon=1e-6, scale=1.5)
    bias = bias_of().numpy() if biased else None
    assert_same(*chosen(Lfm2MoeTopKRouter(config), bias_of()), routing, bias)


def test_ernie_4_5_moe() -> None:
    router = Ernie4_5_MoeTopKRouter(
        Ernie4_5_MoeConfig(
            hidden_size=HIDDEN, num_attention_heads=2, moe_k=TOP_K, moe_num_experts=EXPERTS
        )
    )
    logits, expected = chosen(router)
    bias = router.moe_statics.e_score_correction_bias.detach().numpy()[0]
    assert_same(logits, expected, Routing(TOP_K, epsilon=1e-12), bias)


@pytest.mark.parametrize("jitter", [0.0, 0.01, 0.4])
def test_phi_moe(jitter: float) -> None:
    fields = {**SIZES, "num_experts_per_tok": 2, "router_jitter_noise": jitter}
    router = PhimoeTopKRouter(PhimoeConfig(num_local_experts=EXPERTS, **fields)).eval()
    routing = Routing(2, "sparsemixer", margin=2 * jitter, renormalize=False)
    assert_same(*chosen(router), routing)


@pytest.mark.parametrize("kind", ["granitemoe", "gpt_oss"])
def test_a_softmax_over_those_chosen_is_a_renormalised_one(kind: str) -> None:
    router = (
        GraniteMoeTopKRouter(GraniteMoeConfig(num_local_experts=EXPERTS, **SIZES))
        if kind == "granitemoe"
        else GptOssTopKRouter(GptOssConfig(num_local_experts=EXPERTS, **SIZES))
    )
    assert_same(*chosen(router), Routing(TOP_K))


def test_of_equal_experts_the_lower_are_chosen_and_of_equal_groups_too() -> None:
    logits = np.zeros((2, EXPERTS), np.float32)
    experts, _ = route(logits, None, Routing(3))
    np.testing.assert_array_equal(experts, [[0, 1, 2]] * 2)
    bias = np.zeros(EXPERTS, np.float32)
    bias[:4] = -1
    experts, weights = route(logits, bias, Routing(3, "sigmoid", num_groups=3, top_groups=1))
    np.testing.assert_array_equal(experts, [[4, 5, 6]] * 2)
    np.testing.assert_allclose(weights, 1 / 3, rtol=1e-6)


def test_logits_differ_where_their_scores_are_rounded_to_one() -> None:
    logits = np.asarray([[30, 40, 50, -1]], np.float32)
    experts, _ = route(logits, None, Routing(2, "sigmoid"))
    np.testing.assert_array_equal(experts, [[2, 1]])
