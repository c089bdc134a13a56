"""Every family against Transformers, and what is refused by name."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.support.evaluate import PAGE_SIZE, stepper, steppers
from tests.support.models import (
    FAMILIES,
    LATENT_YARN,
    MAX_SEQ_LEN,
    PHIMOE_ROPE,
    WINDOW,
    architecture_of,
    random_prompt,
    tiny_checkpoint,
    tiny_config,
    transformers_choices,
    transformers_logits,
)
from tests.support.steps import Stepper
from trtc.builder.checkpoint.checkpoint import open_checkpoint
from trtc.builder.checkpoint.verify import settle_experts
from trtc.builder.evaluator import Evaluator
from trtc.builder.families import registry
from trtc.builder.families.config import Config
from trtc.builder.families.llama import llama
from trtc.builder.families.registry import FAMILIES as ARCHITECTURES
from trtc.builder.families.registry import checkpoint_spec, decoder_spec
from trtc.builder.graph import GraphRequest, build_graph
from trtc.builder.request import BuildRequest
from trtc.builder.source import open_source
from trtc.builder.spec import (
    NO_ROPE,
    AttentionSpec,
    DecoderSpec,
    GatedDeltaSpec,
    MoeMlpSpec,
)
from trtc.protos.errors import CheckpointError, RequestError, TrtcError, UnsupportedError
from trtc.protos.manifest import Limits

TOLERANCE = 1e-4
CHUNKS = (7, PAGE_SIZE, 23, 64)
"""Below, at and across page borders; the last takes the prompt whole."""
PROMPT = 53
DECODED = 64
assert PROMPT > 2 * WINDOW and PROMPT % PAGE_SIZE


def config_of(family: str, **fields: Any) -> dict[str, Any]:
    """config.json as Transformers would save it; a field set to ... is left out."""
    config = json.loads(tiny_config(family).to_json_string(use_diff=False))
    config["architectures"] = [architecture_of(family)]
    merged = {**config, **fields}
    return {key: value for key, value in merged.items() if value is not ...}


Checkpoints = Callable[[str], Path]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Family -> its checkpoint, made once and only read."""
    return cache(lambda family: tiny_checkpoint(family, tmp_path_factory.mktemp("models")))


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, checkpoints: Checkpoints) -> Path:
    return checkpoints(request.param)


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Callable[[], Stepper]:
    """Steppers of a family's checkpoint, which is read once."""
    return steppers(checkpoint)


@cache
def logits_of(checkpoint: Path) -> Any:
    """Transformers' logits of the prompt that a family's tests share."""
    return transformers_logits(checkpoint, random_prompt(PROMPT, seed=3))


def test_logits_match_transformers_whatever_the_chunks(
    checkpoint: Path, model: Callable[[], Stepper]
) -> None:
    """And over the first page border token by token, which the next test goes on with."""
    prompt, begin = random_prompt(PROMPT, seed=3), PAGE_SIZE + 1
    for chunk in CHUNKS:
        found = model().prefill(prompt, chunk)
        np.testing.assert_allclose(found, logits_of(checkpoint), rtol=0, atol=TOLERANCE)
    one = model()
    tokens = [one.step({"a": [token]}, length=PROMPT)["a"] for token in prompt[:begin]]
    expected = logits_of(checkpoint)[:begin]
    np.testing.assert_allclose(np.concatenate(tokens), expected, rtol=0, atol=TOLERANCE)


def test_greedy_decoding_gives_the_tokens_of_transformers(
    checkpoint: Path, model: Callable[[], Stepper]
) -> None:
    prompts = {str(length): random_prompt(length, seed=length) for length in (1, 40)}
    found = model().greedy_together(prompts, DECODED, chunk=17)
    for name, prompt in prompts.items():
        assert found[name] == transformers_choices(checkpoint, prompt, found[name])


def test_sequences_that_share_steps_do_not_see_each_other(model: Callable[[], Stepper]) -> None:
    prompts = {name: random_prompt(30, seed=index) for index, name in enumerate("abc")}
    together = model()
    found: dict[str, list[Any]] = {name: [] for name in prompts}
    schedule = [{"a": 20}, {"a": 1, "b": 30}, {"c": 9, "a": 1, "b": 0}, {"c": 21, "a": 8}]
    done = dict.fromkeys(prompts, 0)
    for step in schedule:
        chunks = {}
        for name, count in step.items():
            if count:
                chunks[name] = prompts[name][done[name] : done[name] + count]
                done[name] += count
        for name, logits in together.step(chunks).items():
            found[name].append(logits)
    for name, prompt in prompts.items():
        np.testing.assert_array_equal(np.concatenate(found[name]), model().prefill(prompt, 30))


@pytest.mark.parametrize(("max_seq_len", "length"), [(32, 32), (64, 20), (64, 32), (64, 33)])
def test_longrope_takes_the_factors_of_the_sequence(
    max_seq_len: int, length: int, tmp_path: Path
) -> None:
    path = tiny_checkpoint("phi3_longrope", tmp_path)
    prompt = random_prompt(length)
    found = stepper(path, max_seq_len=max_seq_len).prefill(prompt, 11)
    np.testing.assert_allclose(found, transformers_logits(path, prompt), rtol=0, atol=TOLERANCE)


def test_an_engine_within_longropes_original_length_has_one_set_of_factors(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(tiny_checkpoint("phi3_longrope", tmp_path)))
    assert checkpoint_spec(checkpoint, 32).rope_switch is None
    assert checkpoint_spec(checkpoint, 33).rope_switch == 32


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_stored_halves_are_widened_exactly(dtype: str, tmp_path: Path) -> None:
    path = tiny_checkpoint("qwen2", tmp_path, dtype)
    prompt = random_prompt(20)
    found = stepper(path).prefill(prompt, 20)
    np.testing.assert_allclose(found, transformers_logits(path, prompt), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["pyllama", "pyllama-draft", "pyhybrid"])
def test_the_bundled_checkpoints_match_transformers(name: str) -> None:
    path = Path("examples/models") / name
    prompt = random_prompt(60, vocab_size=4000)
    found = stepper(path).prefill(prompt, 32)
    np.testing.assert_allclose(found, transformers_logits(path, prompt), rtol=0, atol=TOLERANCE)


GEMMA3_ONE_BASE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
}


GEMMA4_WHOLE_HEADS = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
    "full_attention": {"rope_type": "proportional", "rope_theta": 10000.0},
}


PHIMOE_UNSCALED = {**PHIMOE_ROPE, "short_mscale": 1.0, "long_mscale": 1.0}
PHIMOE_TWO_SCALES = {**PHIMOE_ROPE, "long_mscale": 2.0}
MINISTRAL3_UNSCALED = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


GLM_PATTERN = {"indexer_types": None, "index_topk_pattern": "FSXS"}
LLAMA4_NO_STEP = {"moe_layers": ..., "interleave_moe_layer_step": 0}


@pytest.mark.parametrize("family", ["mistral", "qwen2", "gemma2", "gemma3", "mixtral", "llama4"])
def test_pages_that_a_window_has_left_are_nobodys(family: str, tmp_path: Path) -> None:
    """Each group has its own page table; pages out of every window go to others at once."""
    path = tiny_checkpoint(family, tmp_path)
    one = stepper(path, window_groups=True)
    for number, chunk in enumerate((1, 23, 64)):
        prompt = random_prompt(PROMPT + number, seed=number)
        found = one.prefill(prompt, chunk, name=str(number))
        expected = transformers_logits(path, prompt)
        np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


def test_lfm2s_convolutions_with_biases_and_more_taps(tmp_path: Path) -> None:
    fields: dict[str, Any] = {
        "conv_bias": True,
        "conv_L_cache": 4,
        "block_auto_adjust_ff_dim": False,
        "tie_word_embeddings": False,
    }
    path = tiny_checkpoint("lfm2", tmp_path, **fields)
    prompt = random_prompt(PROMPT)
    expected = transformers_logits(path, prompt)
    for chunk in (1, 23):
        found = stepper(path).prefill(prompt, chunk)
        np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    "fields",
    [
        {"position_embedding_type": "rope", "num_local_experts": 0, "mamba_n_groups": 4},
        {
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
            "attention_bias": True,
            "mamba_d_conv": 3,
            "time_step_limit": (0.3, 0.9),
        },
    ],
)
def test_granites_hybrids_of_other_kinds(fields: dict[str, Any], tmp_path: Path) -> None:
    path = tiny_checkpoint("granite_moe_hybrid", tmp_path, **fields)
    prompt = random_prompt(PROMPT)
    expected = transformers_logits(path, prompt)
    for chunk in (1, 23):
        found = stepper(path).prefill(prompt, chunk)
        np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


# --- features that must be awake for the comparison above to mean anything ----------------------


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama3", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
        ("llama_yarn", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
        ("mistral", {"sliding_window": None}),
        ("qwen2", {"max_window_layers": 2, "layer_types": ...}),
        ("gemma2", {"attn_logit_softcapping": None}),
        ("gemma2", {"final_logit_softcapping": None}),
        ("gemma2", {"query_pre_attn_scalar": 32}),
        ("gemma2", {"layer_types": ["full_attention"] * 4}),
        ("gemma3", {"layer_types": ["full_attention"] * 6}),
        ("gemma3", {"query_pre_attn_scalar": 32}),
        ("gemma3", {"rope_parameters": {"rope_theta": 10000.0}, "rope_local_base_freq": 1000.0}),
        ("gemma3", {"rope_parameters": GEMMA3_ONE_BASE}),
        ("gemma4", {"sliding_window": 60}),
        ("gemma4", {"final_logit_softcapping": None}),
        ("gemma4", {"rope_parameters": GEMMA4_WHOLE_HEADS}),
        ("phi3", {"sliding_window": None}),
        ("llama4", {"attention_chunk_size": 2 * WINDOW}),
        ("llama4", {"layer_types": ["full_attention"] * 4}),
        ("llama4", {"use_qk_norm": False}),
        ("llama4", {"attn_temperature_tuning": False}),
        ("llama4", {"floor_scale": 17}),
        ("llama4", {"no_rope_layers": [1, 1, 1, 1]}),
        ("llama4_scout", {"num_experts_per_tok": 1}),
        ("phi3_longrope", {"original_max_position_embeddings": 256}),
        ("qwen3_moe", {"norm_topk_prob": False}),
        ("glm4_moe", {"n_group": 1, "topk_group": 1}),
        ("glm4_moe", {"routed_scaling_factor": 1.0}),
        ("lfm2_moe", {"use_expert_bias": False}),
        ("deepseek_v3", {"n_group": 1, "topk_group": 1}),
        ("deepseek_v3", {"norm_topk_prob": False}),
        ("deepseek_v3", {"rope_parameters": {**LATENT_YARN, "mscale_all_dim": 0}}),
        ("deepseek_v3", {"rope_interleave": False}),
        ("deepseek_v32", {"index_topk": PROMPT}),
        ("deepseek_v32", {"index_topk": 10}),
        ("deepseek_v2", {"topk_method": "greedy"}),
        ("deepseek_v2", {"routed_scaling_factor": 1.0}),
        ("mistral4", {"norm_topk_prob": False}),
        ("mistral4", {"rope_parameters": LATENT_YARN}),
        ("lfm2_moe", {"norm_topk_prob": False}),
        ("granite_moe", {"num_experts_per_tok": 1}),
        ("granite_moe_hybrid", {"position_embedding_type": "rope"}),
        ("nemotron_h", {"time_step_limit": [0.5, 1.0]}),
        ("nemotron_h", {"layer_norm_epsilon": 1e-1}),
        ("nemotron_h", {"mlp_hidden_act": "silu"}),
        ("nemotron_h_moe", {"norm_topk_prob": False}),
        ("nemotron_h_moe", {"routed_scaling_factor": 1.0}),
        ("granite_moe_hybrid", {"time_step_limit": [0.5, {"__float__": "Infinity"}]}),
        ("granite_moe_hybrid", {"time_step_limit": [0, 0.5]}),
        ("mixtral", {"num_experts_per_tok": 1}),
        ("jamba", {"num_experts_per_tok": 1}),
        ("jamba", {"rms_norm_eps": 1e-1}),
        ("lfm2", {"norm_eps": 1e-2}),
        ("ministral3", {"rope_parameters": MINISTRAL3_UNSCALED}),
        ("smollm3", {"no_rope_layers": [1, 1, 1, 1]}),
        ("smollm3", {"use_sliding_window": False}),
        ("olmo3", {"layer_types": ["full_attention"] * 4}),
        ("olmo3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}}),
        ("ministral", {"layer_types": ...}),
        ("cwm", {"layer_types": ["full_attention"] * 2}),
        ("youtu", {"rope_interleave": False}),
        ("olmo_hybrid", {"linear_allow_neg_eigval": False}),
        ("olmo_hybrid", {"rope_parameters": {"rope_theta": None}}),
        ("olmo_hybrid_nope", {"rope_parameters": {"rope_theta": 1000.0}}),
        ("olmoe", {"norm_topk_prob": True}),
        ("granite", {"embedding_multiplier": 1.0}),
        ("granite", {"residual_multiplier": 1.0}),
        ("granite", {"attention_multiplier": 0.25}),
        ("granite", {"logits_scaling": 1.0}),
        ("granite", {"rms_norm_eps": 1e-2}),
        ("glm4", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.0}}),
        ("exaone4", {"layer_types": ["full_attention"] * 4}),
        ("cohere", {"logit_scale": 1.0}),
        ("cohere", {"layer_norm_eps": 1e-1}),
        ("cohere2", {"layer_types": ["full_attention"] * 4}),
        ("starcoder2", {"sliding_window": None}),
        ("starcoder2", {"hidden_act": "silu"}),
        ("stablelm", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}}),
        ("nemotron", {"norm_eps": 1e-1}),
        ("lfm2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
        ("hunyuan_dense", {"rope_parameters": {"rope_type": "default"}}),
        ("hunyuan_moe", {"moe_topk": 2}),
        ("phimoe", {"router_jitter_noise": 0.01}),
        ("phimoe", {"lm_head_bias": False}),
        ("phimoe", {"sliding_window": None}),
        ("phimoe", {"rope_parameters": PHIMOE_UNSCALED}),
    ],
)
def test_leaving_a_feature_out_changes_the_logits(
    family: str, fields: dict[str, Any], checkpoints: Checkpoints, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(checkpoints(family), tmp_path / family))
    (path / "config.json").write_text(json.dumps(config_of(family, **fields)))
    found = stepper(path).prefill(random_prompt(PROMPT, seed=3), PROMPT)
    assert abs(found - logits_of(checkpoints(family))).max() > 100 * TOLERANCE


# --- spellings --------------------------------------------------------------------------------


def flat_spelling(family: str) -> dict[str, Any]:
    """The same config as Transformers 4 wrote it."""
    config = config_of(family)
    parameters = dict(config.pop("rope_parameters"))
    if "sliding_attention" in parameters:
        config["rope_local_base_freq"] = parameters["sliding_attention"]["rope_theta"]
        parameters = dict(parameters["full_attention"])
    config["rope_theta"] = parameters.pop("rope_theta")
    if "partial_rotary_factor" in parameters:
        config["partial_rotary_factor"] = parameters.pop("partial_rotary_factor")
    kind = parameters.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {"type": kind, **parameters}
    return config


ONE_SPELLING = ("gemma4", "kimi_linear", "nemotron_h", "jamba")
"""Families that newer Transformers alone have, or without a rotary embedding."""


@pytest.mark.parametrize("family", [one for one in FAMILIES if not one.startswith(ONE_SPELLING)])
def test_flat_and_nested_rope_spellings_mean_the_same(family: str) -> None:
    assert decoder_spec(flat_spelling(family), 64) == decoder_spec(config_of(family), 64)


def test_the_older_name_of_the_expert_count() -> None:
    older = config_of("qwen3_moe", num_local_experts=..., num_experts=6)
    assert decoder_spec(older, 64) == decoder_spec(config_of("qwen3_moe"), 64)


def test_phi3_reads_su_as_longrope() -> None:
    config = flat_spelling("phi3_longrope")
    config["rope_scaling"]["type"] = "su"
    assert decoder_spec(config, 64) == decoder_spec(config_of("phi3_longrope"), 64)


@pytest.mark.parametrize(
    "fields",
    [
        {"indexer_types": ..., "index_topk_pattern": "FSFS"},
        {"indexer_types": ..., "index_topk_pattern": ["full", "shared", "full", "shared"]},
        {"indexer_types": ..., "index_topk_freq": 2, "index_skip_topk_offset": 1},
    ],
)
def test_glms_layers_with_an_indexer_by_all_of_their_spellings(fields: dict[str, Any]) -> None:
    expected = decoder_spec(config_of("glm_moe_dsa"), 64)
    assert [one.selection_layer for _, one in expected.latent_attentions] == [None, 0, None, 2]
    assert decoder_spec(config_of("glm_moe_dsa", **fields), 64) == expected


def test_glm_5_2_as_published() -> None:
    """One layer in four has an indexer, behind the first three."""
    fields = {
        "num_hidden_layers": 78,
        "mlp_layer_types": ...,
        "indexer_types": ...,
        "index_topk_pattern": None,
        "index_topk_freq": 4,
        "index_skip_topk_offset": 3,
        "indexer_rope_interleave": True,
        "rope_interleave": True,
        "num_nextn_predict_layers": 1,
    }
    spec = decoder_spec(config_of("glm_moe_dsa", **fields), 64)
    full = [index for index, one in spec.latent_attentions if one.indexer is not None]
    assert full == [0, 1, *range(2, 78, 4)]
    sources = [one.selection_layer for _, one in spec.latent_attentions]
    assert sources[:8] == [None, None, None, 2, 2, 2, None, 6]


def test_all_of_glms_layers_have_an_indexer_where_nothing_is_said() -> None:
    spec = decoder_spec(config_of("glm_moe_dsa", indexer_types=...), 64)
    assert len(spec.indexers) == len(spec.layers)


KIMI_LINEAR = {
    "kda_layers": [1, 3],
    "full_attn_layers": [2],
    "num_heads": 4,
    "head_dim": 16,
    "short_conv_kernel_size": 4,
}


def kimi_linear(**fields: Any) -> dict[str, Any]:
    """Fields of config.json with others in `linear_attn_config`."""
    return {"layer_types": ..., "linear_attn_config": {**KIMI_LINEAR, **fields}}


def test_kimi_linear_as_published() -> None:
    """Layers counted from 1, sizes in an object of their own, and dense layers by their number."""
    own = ("linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim", "mlp_layer_types")
    published = config_of(
        "kimi_linear",
        **kimi_linear(),
        **dict.fromkeys(own, ...),
        first_k_dense_replace=1,
        mla_use_nope=True,
        moe_layer_freq=1,
        moe_router_activation_func="sigmoid",
        rope_theta=10000.0,
        rope_scaling=None,
        use_grouped_topk=True,
    )
    assert decoder_spec(published, 64) == decoder_spec(config_of("kimi_linear"), 64)


def test_dense_layers_of_kimi_linear_by_both_of_their_names(tmp_path: Path) -> None:
    """Transformers saves them by the name of layers with experts."""
    saved = tiny_checkpoint("kimi_linear", tmp_path)
    file = saved / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    expected = stepper(saved).prefill(random_prompt(9), 9)
    names = {name: name.replace("layers.0.block_sparse_moe.", "layers.0.mlp.") for name in tensors}
    assert sum(name != new for name, new in names.items()) == 3
    safetensors.numpy.save_file({names[name]: one for name, one in tensors.items()}, file)
    np.testing.assert_array_equal(stepper(saved).prefill(random_prompt(9), 9), expected)


def test_quantised_dense_layers_of_kimi_linear_are_found(tmp_path: Path) -> None:
    """They have no tensor of the weight's name."""
    saved = tiny_checkpoint("kimi_linear", tmp_path)
    file, dense = saved / "model.safetensors", "model.layers.0.block_sparse_moe."
    tensors = safetensors.numpy.load_file(file)
    packed = {
        f"{name}_packed" if name.startswith(dense) else name: tensors[name] for name in tensors
    }
    safetensors.numpy.save_file(packed, file)
    checkpoint = open_checkpoint(str(saved))
    spec = settle_experts(checkpoint_spec(checkpoint, 64), checkpoint.open_weights())
    (mlp,) = spec.layers[0].mlps
    assert mlp.up.name == f"{dense}up_proj" and mlp.down.name == f"{dense}down_proj"


def test_olmo_hybrid_as_published() -> None:
    """All heads by one number, and no rotary embedding."""
    own = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    given = {f"linear_{name}": ... for name in own} | {"layer_types": ...}
    published = config_of(
        "olmo_hybrid",
        **given,
        hidden_size=3840,
        num_attention_heads=30,
        num_key_value_heads=30,
        num_hidden_layers=32,
        rope_parameters={"rope_theta": None},
    )
    spec = decoder_spec(published, 64)
    assert [index for index, _ in spec.attentions] == list(range(3, 32, 4))
    assert {one.rope for _, one in spec.attentions} == {NO_ROPE}
    net = spec.layers[0].mixer
    assert isinstance(net, GatedDeltaSpec)
    assert (net.num_key_heads, net.key_dim) == (30, 96)
    assert (net.num_value_heads, net.value_dim) == (30, 192)


@pytest.mark.parametrize("layers", [2, 3, 4, 9])
def test_layers_of_olmo_hybrid_where_none_are_named(layers: int) -> None:
    expected = tiny_config("olmo_hybrid", layer_types=None, num_hidden_layers=layers)
    fields = {"layer_types": ..., "num_hidden_layers": layers}
    spec = decoder_spec(config_of("olmo_hybrid", **fields), 64)
    attends = [kind == "full_attention" for kind in expected.layer_types]
    assert [isinstance(layer.mixer, AttentionSpec) for layer in spec.layers] == attends


HYBRID_NAMES = {
    "model.layers.0.attention_layer_norm": "model.layers.0.input_layernorm",
    "model.layers.0.feedforward_layer_norm": "model.layers.0.post_attention_layernorm",
    "model.layers.1.feedforward_layer_norm": "model.layers.1.post_attention_layernorm",
}
"""Tensors of OLMo Hybrid as Transformers saves them, and as its model has them. In published
checkpoints layers with delta nets have the first names, those with attention the others."""


@pytest.mark.parametrize("layers", [("1",), ("0", "1")])
def test_olmo_hybrid_by_all_names_of_its_tensors(layers: tuple[str, ...], tmp_path: Path) -> None:
    """And with the convolution in parts of q, k and v, not in three as large as each other."""
    saved = tiny_checkpoint("olmo_hybrid", tmp_path)
    file = saved / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    expected = stepper(saved).prefill(random_prompt(9), 9)
    for own, other in HYBRID_NAMES.items():
        if own.split(".")[2] in layers:
            tensors[f"{other}.weight"] = tensors.pop(f"{own}.weight")
    for index in (0, 2, 3):
        names = [f"model.layers.{index}.linear_attn.{one}_conv1d.weight" for one in "qkv"]
        joined = np.concatenate([tensors[name] for name in names])
        parts = np.split(joined, (48, 96))
        tensors |= {name: part.copy() for name, part in zip(names, parts, strict=True)}
    safetensors.numpy.save_file(tensors, file)
    np.testing.assert_array_equal(stepper(saved).prefill(random_prompt(9), 9), expected)
    request = BuildRequest(model=str(saved), output=tmp_path / "e", dtype="fp32")
    assert open_source(request).unknown_tensors == ()


def test_lfm2_as_its_first_checkpoints_spell_it() -> None:
    config = config_of("lfm2")
    spec = decoder_spec(config, 64)
    older = config_of(
        "lfm2",
        layer_types=...,
        full_attn_idxs=[1, 4],
        intermediate_size=...,
        block_ff_dim=config["intermediate_size"],
        tie_word_embeddings=...,
        tie_embedding=True,
        block_use_xavier_init=True,
    )
    assert decoder_spec(older, 64) == spec
    assert [index for index, _ in spec.attentions] == [1, 4]
    everywhere = decoder_spec({**older, "full_attn_idxs": None}, 64)
    assert [index for index, _ in everywhere.attentions] == [0, 1, 2, 3, 4]


def test_nemotrons_layers_by_letters_and_by_older_names() -> None:
    config = config_of("nemotron_h_moe")
    spec = decoder_spec(config, 64)
    older = ["moe", "mamba", "moe", "attention"]
    assert decoder_spec({**config, "layers_block_type": older}, 64) == spec
    letters = config_of(
        "nemotron_h_moe", layers_block_type=..., hybrid_override_pattern="EME*", time_step_limit=...
    )
    assert decoder_spec({**letters, "num_hidden_layers": 4}, 64) == spec
    assert [index for index, _ in spec.attentions] == [3]


def test_nemotrons_experts_in_one_tensor(tmp_path: Path) -> None:
    """As Transformers keeps them, and without a latent."""
    fields: dict[str, Any] = {"moe_latent_size": None, "mlp_bias": True}
    path = tiny_checkpoint("nemotron_h_moe", tmp_path, **fields)
    prompt = random_prompt(PROMPT)
    expected = transformers_logits(path, prompt)
    np.testing.assert_allclose(stepper(path).prefill(prompt, 23), expected, rtol=0, atol=TOLERANCE)
    tensors = safetensors.numpy.load_file(path / "model.safetensors")
    for layer in (0, 2):
        for name in ("up_proj", "down_proj"):
            place = f"backbone.layers.{layer}.mixer.experts"
            own = [tensors.pop(f"{place}.{number}.{name}.weight") for number in range(6)]
            tensors[f"{place}.{name}"] = np.stack(own)
    safetensors.numpy.save_file(tensors, path / "model.safetensors")
    np.testing.assert_allclose(stepper(path).prefill(prompt, 23), expected, rtol=0, atol=TOLERANCE)


def test_granites_hybrids_as_their_first_checkpoints_spell_them() -> None:
    older = config_of(
        "granite_moe_hybrid",
        layer_types=["mamba", "attention", "mamba"],
        position_embedding_type="nope",
        time_step_limit=...,
        mamba_d_head="auto",
    )
    assert decoder_spec(older, 64) == decoder_spec(config_of("granite_moe_hybrid"), 64)
    everywhere = decoder_spec({**older, "layer_types": None}, 64)
    assert everywhere.keeps_states and not everywhere.attentions


@pytest.mark.parametrize(
    ("fields", "size"),
    [
        ({}, 64),
        ({"block_multiple_of": 24}, 72),
        ({"block_ffn_dim_multiplier": 1.3, "block_multiple_of": 1}, 83),
        ({"block_auto_adjust_ff_dim": False}, 96),
    ],
)
def test_lfm2s_intermediate_size_is_transformers(fields: dict[str, Any], size: int) -> None:
    config = config_of("lfm2", **fields)
    model = transformers.AutoModelForCausalLM.from_config(tiny_config("lfm2", **fields))
    assert model.model.layers[0].feed_forward.w1.out_features == size
    assert {one.out_features for one in decoder_spec(config, 64).linears if "w1" in one.name} == {
        size
    }


def test_gemma3s_pattern_is_five_windows_and_a_full_layer() -> None:
    config = config_of("gemma3", layer_types=..., sliding_window_pattern=..., num_hidden_layers=13)
    windows = [one.attention.window for one in decoder_spec(config, 64).layers]
    assert windows == ([WINDOW] * 5 + [None]) * 2 + [WINDOW]
    other = decoder_spec({**config, "sliding_window_pattern": 2}, 64).layers
    assert [one.attention.window for one in other[:4]] == [WINDOW, None] * 2


def test_what_published_gemma3_configs_leave_out() -> None:
    """The text part of a Gemma3ForConditionalGeneration says only what differs from 4B's."""
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    spec = decoder_spec(config, 4096)
    oracle = transformers.Gemma3TextConfig(**config)
    attention = spec.layers[5].attention
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (
        oracle.num_attention_heads,
        oracle.num_key_value_heads,
        oracle.head_dim,
    )
    assert spec.vocab_size == oracle.vocab_size
    assert spec.max_position_embeddings == oracle.max_position_embeddings
    assert attention.scale == oracle.query_pre_attn_scalar**-0.5
    full, window = attention.rope.inv_freq, spec.layers[0].attention.rope.inv_freq
    assert full[1] * 8 == pytest.approx(1e6 ** (-1 / 128)) and full[0] == 1 / 8
    assert window[1] == pytest.approx(1e4 ** (-1 / 128)) and window[0] == 1.0


def test_what_published_gemma4_configs_say_of_full_layers() -> None:
    """`global_*` fields say it of all of them, `per_layer_config` of each, by "05" and "11"."""
    published = {
        "num_hidden_layers": 12,
        "head_dim": 64,
        "global_head_dim": 128,
        "num_key_value_heads": 4,
        "num_global_key_value_heads": 2,
        "hidden_size_per_layer_input": 0,
    }
    for fields in (published, {**published, "attention_k_eq_v": True}):
        oracle = transformers.Gemma4TextConfig(**fields)
        config = {**fields, "architectures": ["Gemma4ForCausalLM"]}
        saved = {**oracle.to_dict(), "architectures": ["Gemma4ForCausalLM"]}
        assert "per_layer_config" in saved and "global_head_dim" not in saved
        assert set(saved["per_layer_config"]) == {"05", "11"}
        layers = decoder_spec(config, 4096).layers
        assert layers == decoder_spec(saved, 4096).layers
        for index, layer in enumerate(layers):
            own = oracle.per_layer_config[index]
            heads = (layer.attention.num_kv_heads, layer.attention.head_dim)
            assert heads == (own.num_key_value_heads, own.head_dim)
            is_full = oracle.layer_types[index] == "full_attention"
            assert layer.attention.window == (None if is_full else oracle.sliding_window)
            assert (layer.attention.v is None) == (is_full and oracle.attention_k_eq_v)
    full = layers[-1].attention.rope.inv_freq
    assert np.count_nonzero(full) == 16 and full[1] == pytest.approx(1e6 ** (-1 / 64))
    assert layers[0].attention.rope.inv_freq[1] == pytest.approx(1e4 ** (-1 / 32))


@pytest.mark.parametrize(
    ("family", "architecture", "prefix", "others"),
    [
        ("gemma3", "Gemma3", "language_model.model.", ["vision_tower.patch.weight"]),
        ("gemma3", "Gemma3", "model.language_model.", ["vision_tower.patch.weight"]),
        ("gemma4", "Gemma4", "model.language_model.", ["model.embed_vision.norm.weight"]),
        ("gemma4", "Gemma4Unified", "model.language_model.", ["model.vision_embedder.pos.weight"]),
        (
            "qwen3_5",
            "Qwen3_5",
            "model.language_model.",
            ["model.visual.patch_embed.proj.weight", "mtp.fc.weight", "mtp.layers.0.mlp.weight"],
        ),
        (
            "deepseek_v3",
            "KimiK25",
            "language_model.model.",
            ["vision_tower.patch_embed.proj.weight", "mm_projector.proj.0.weight"],
        ),
        ("mistral4", "Mistral3", "language_model.model.", ["vision_tower.ln_pre.weight"]),
        (
            "llama4",
            "Llama4",
            "language_model.model.",
            ["vision_model.layernorm_pre.weight", "multi_modal_projector.linear_1.weight"],
        ),
    ],
)
def test_a_text_model_inside_another_is_found_by_its_prefix(
    family: str, architecture: str, prefix: str, others: list[str], tmp_path: Path
) -> None:
    """As published (Gemma 3's is language_model.model.*), and as Transformers 5 saves it."""
    path = tiny_checkpoint(family, tmp_path)
    whole = tmp_path / "wrapper"
    whole.mkdir()
    tensors = safetensors.numpy.load_file(path / "model.safetensors")
    renamed = {
        prefix + name.removeprefix("model.") if name.startswith("model.") else name: value
        for name, value in tensors.items()
    }
    renamed |= {name: np.zeros((2, 2), np.float32) for name in others}
    safetensors.numpy.save_file(renamed, whole / "model.safetensors")
    text = json.loads((path / "config.json").read_text())
    config = {"architectures": [f"{architecture}ForConditionalGeneration"], "text_config": text}
    (whole / "config.json").write_text(json.dumps(config))
    source = open_source(
        BuildRequest(model=str(whole), output=tmp_path / "e", dtype="fp32", max_seq_len=64)
    )
    assert source.unknown_tensors == () and source.spec.embedding == f"{prefix}embed_tokens.weight"
    limits = Limits(max_batch_size=4, max_seq_len=64, max_num_tokens=64)
    request = GraphRequest(source.scheme, "f32", limits, None, PAGE_SIZE)
    module = build_graph(source.spec, request, source.reader)
    prompt = random_prompt(PROMPT)
    found = Stepper(Evaluator(module, source.reader).run, module.kv).prefill(prompt, 23)
    np.testing.assert_allclose(found, transformers_logits(path, prompt), rtol=0, atol=TOLERANCE)


def test_experts_of_a_layer_may_lie_in_two_tensors(tmp_path: Path) -> None:
    """As published Qwen3.5 has them; the engine is the same, and so is what calibration makes."""
    path = tiny_checkpoint("qwen3_moe", tmp_path)
    prompt = random_prompt(20)
    expected = transformers_logits(path, prompt)
    tensors = safetensors.numpy.load_file(path / "model.safetensors")
    for layer in (0, 2):
        experts = f"model.layers.{layer}.mlp.experts"
        parts = {
            name: np.stack([tensors.pop(f"{experts}.{one}.{name}.weight") for one in range(6)])
            for name in ("gate_proj", "up_proj", "down_proj")
        }
        gate_up = np.concatenate((parts["gate_proj"], parts["up_proj"]), axis=1)
        tensors |= {f"{experts}.gate_up_proj": gate_up, f"{experts}.down_proj": parts["down_proj"]}
    safetensors.numpy.save_file(tensors, path / "model.safetensors")
    np.testing.assert_allclose(transformers_logits(path, prompt), expected, atol=1e-6)
    source = open_source(BuildRequest(model=str(path), output=tmp_path / "e", dtype="fp32"))
    assert source.unknown_tensors == ()
    limits = Limits(max_batch_size=4, max_seq_len=64, max_num_tokens=64)
    request = GraphRequest(source.scheme, "f32", limits, None, PAGE_SIZE)
    module = build_graph(source.spec, request, source.reader)
    found = Stepper(Evaluator(module, source.reader).run, module.kv).prefill(prompt, 20)
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)
    assert source.calibrated_spec.layers[0] != source.spec.layers[0]
    assert source.calibrated_spec.layers[1] == source.spec.layers[1]


def test_a_dynamic_rotary_embedding_is_the_plain_one_within_max_position_embeddings() -> None:
    """Which an engine's sequences never leave."""
    plain = {"rope_type": "default", "rope_theta": 500.0}
    dynamic = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 6.0}
    specs = [
        decoder_spec(config_of("llama", rope_parameters=rope), MAX_SEQ_LEN)
        for rope in (plain, dynamic)
    ]
    assert specs[0] == specs[1]
    computed, _ = ROPE_INIT_FUNCTIONS["dynamic"](
        tiny_config("llama", rope_parameters=dynamic), seq_len=MAX_SEQ_LEN
    )
    np.testing.assert_allclose(specs[1].layers[0].attention.rope.inv_freq, computed, rtol=1e-6)


@pytest.mark.parametrize("older", [False, True])
def test_internlm3_is_llama_with_biases_of_its_own(older: bool) -> None:
    """Published configs have `qkv_bias` and `bias`; Transformers saves Llama's names of them."""
    names = ("qkv_bias", "bias") if older else ("attention_bias", "mlp_bias")
    absent: dict[str, Any] = {"attention_bias": ..., "mlp_bias": ...}
    fields: dict[str, Any] = {**absent, **dict.fromkeys(names, True)}
    fields["architectures"] = ["InternLM3ForCausalLM"]
    found = decoder_spec(config_of("llama_biased", head_dim=32, **fields), 64)
    biased = {"attention_bias": True, "mlp_bias": True}
    llama = decoder_spec(config_of("llama_biased", head_dim=32, **biased), 64)
    assert found.layers == llama.layers
    assert all(linear.has_bias for linear in found.linears)


def test_what_older_configs_of_exaone4_and_smollm3_leave_out() -> None:
    """The pattern says which layers have windows, the interval which have a rotary embedding."""
    exaone4 = config_of("exaone4")
    for pattern in (2, "LLLG"):
        older = {**exaone4, "layer_types": None, "sliding_window_pattern": pattern}
        windows = [one.attention.window for one in decoder_spec(older, 64).layers]
        last_of = 2 if pattern == 2 else 4
        assert windows == [None if (i + 1) % last_of == 0 else WINDOW for i in range(4)]
    everywhere = decoder_spec({**exaone4, "sliding_window": None}, 64)
    assert {one.attention.window for one in everywhere.layers} == {None}
    assert NO_ROPE not in {one.attention.rope for one in everywhere.layers}
    older = config_of("smollm3", no_rope_layers=..., layer_types=..., no_rope_layer_interval=3)
    layers = decoder_spec(older, 64).layers
    assert [one.attention.rope is NO_ROPE for one in layers] == [False, False, True, False]
    assert [one.attention.window for one in layers] == [None, None, WINDOW, None]


def test_mistral3s_text_model_has_its_lm_head_inside(tmp_path: Path) -> None:
    """As published; language_model.lm_head is not tied to the embeddings."""
    path = tiny_checkpoint("ministral3", tmp_path)
    whole = tmp_path / "wrapper"
    whole.mkdir()
    tensors = safetensors.numpy.load_file(path / "model.safetensors")
    renamed = {f"language_model.{name}": value for name, value in tensors.items()}
    renamed["multi_modal_projector.linear.weight"] = np.zeros((2, 2), np.float32)
    safetensors.numpy.save_file(renamed, whole / "model.safetensors")
    text = json.loads((path / "config.json").read_text())
    config = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text}
    (whole / "config.json").write_text(json.dumps(config))
    request = BuildRequest(str(whole), tmp_path / "e", dtype="fp32", max_seq_len=64)
    source = open_source(request)
    assert source.unknown_tensors == ()
    assert source.spec.lm_head.name == "language_model.lm_head"
    assert source.spec.layers[0].attention.query_scale is not None


def test_null_and_absent_windows_differ_for_mistral() -> None:
    def window(spec: DecoderSpec) -> int | None:
        return spec.layers[0].attention.window

    assert window(decoder_spec(config_of("mistral", sliding_window=None), 64)) is None
    assert window(decoder_spec(config_of("mistral", sliding_window=...), 64)) == 4096


def test_dense_layers_among_routed_ones() -> None:
    layers = decoder_spec(config_of("qwen3_moe"), 64).layers
    assert [isinstance(layer.mlp, MoeMlpSpec) for layer in layers] == [True, False, True]


def test_several_end_tokens() -> None:
    assert decoder_spec(config_of("llama", eos_token_id=[2, 7]), 64).eos_token_ids == (2, 7)
    assert decoder_spec(config_of("llama", eos_token_id=None), 64).eos_token_ids == ()


# --- refusals ---------------------------------------------------------------------------------

GEMMA4_HEADS = {"2": {"head_dim": 32}, "5": {"head_dim": 64}}
GEMMA4_MLPS = {"2": {"intermediate_size": 32}}
NO_ALPHA = {"rope_type": "dynamic", "factor": 1.0, "alpha": "much"}
LLAMA3_REVERSED = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 4.0,
    "high_freq_factor": 4.0,
}
LONGROPE_SHORT_LIST = {
    "rope_type": "longrope",
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0],
    "long_factor": [1.0],
}
LFM2_ENORMOUS = {"block_ffn_dim_multiplier": 998, "intermediate_size": 1 << 20}
EXAONE4_PATTERN = {"sliding_window_pattern": "LLG", "layer_types": ...}
HALF_ROTARY = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
ODD_ROTARY = {"partial_rotary_factor": 0.2}


NO_KINDS: dict[str, Any] = {"layers_block_type": ...}
MANY_EXPERTS = {"layers_block_type": ["moe"] * 1000, "n_routed_experts": 4096}


@pytest.mark.parametrize(
    ("family", "fields", "error", "message"),
    [
        ("llama", {"architectures": ["T5ForCausalLM"]}, UnsupportedError, "T5ForCausalLM"),
        ("gpt_oss", {"swiglu_alpha": 1.0}, UnsupportedError, "swiglu_alpha"),
        ("gpt_oss", {"swiglu_limit": -7.0}, CheckpointError, "swiglu_limit"),
        ("gpt_oss", {"hidden_act": "gelu"}, UnsupportedError, "hidden_act"),
        ("gpt_oss", {"layer_types": ["sliding_attention"]}, CheckpointError, "layer_types"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, UnsupportedError, "Class"),
        ("llama", {"architectures": ...}, CheckpointError, "architectures: is missing"),
        ("llama", {"architectures": []}, CheckpointError, "architectures: is missing"),
        ("llama", {"hidden_act": "relu2"}, UnsupportedError, "hidden_act: 'relu2'"),
        ("llama", {"hidden_size": ...}, CheckpointError, "hidden_size: is missing"),
        ("llama", {"hidden_size": "64"}, CheckpointError, "hidden_size: is '64'"),
        ("llama", {"num_hidden_layers": 0}, CheckpointError, "num_hidden_layers: is 0"),
        ("llama", {"num_hidden_layers": True}, CheckpointError, "num_hidden_layers: is True"),
        ("llama", {"num_key_value_heads": 3}, CheckpointError, "3 does not divide the 4"),
        ("llama", {"head_dim": None, "num_attention_heads": 6}, CheckpointError, "6 does not"),
        ("llama", {"rms_norm_eps": float("inf")}, CheckpointError, "rms_norm_eps: is inf"),
        ("llama", {"rms_norm_eps": "small"}, CheckpointError, "rms_norm_eps: is 'small'"),
        ("llama", {"attention_bias": 1}, CheckpointError, "attention_bias: is 1"),
        ("llama", {"eos_token_id": "two"}, CheckpointError, "eos_token_id"),
        ("llama", {"rope_parameters": {"rope_type": "spiral"}}, UnsupportedError, "'spiral'"),
        ("phimoe", {"num_experts_per_tok": 3}, UnsupportedError, "num_experts_per_tok: 3"),
        ("phimoe", {"router_jitter_noise": -1}, CheckpointError, "noise: is -1"),
        ("phimoe", {"rope_parameters": PHIMOE_TWO_SCALES}, UnsupportedError, "long_mscale: 2.0"),
        ("hunyuan_dense", {"use_cla": True}, UnsupportedError, "use_cla: True"),
        ("hunyuan_dense", {"use_qk_norm": False}, UnsupportedError, "use_qk_norm: False"),
        ("hunyuan_dense", {"rope_parameters": NO_ALPHA}, CheckpointError, "alpha: is 'much'"),
        ("hunyuan_moe", {"moe_topk": [7, 1]}, CheckpointError, "is 7, and there are 6 experts"),
        ("hunyuan_moe", {"moe_topk": [1]}, CheckpointError, "1 values, and there is a layer 1"),
        ("hunyuan_moe", {"moe_layer_num_skipped": 1}, UnsupportedError, "num_skipped: 1"),
        ("hunyuan_moe", {"num_shared_expert": [1, 2]}, UnsupportedError, "shared_expert: 2"),
        ("hunyuan_moe", {"moe_intermediate_size": 64}, UnsupportedError, "size: 64"),
        ("llama", {"rope_parameters": {"type": "linear"}}, CheckpointError, "factor: is missing"),
        ("llama", {"rope_parameters": {"full_attention": {}}}, UnsupportedError, "by layer type"),
        ("llama", {"rope_parameters": [1]}, CheckpointError, "not an object"),
        ("llama3", {"rope_parameters": LLAMA3_REVERSED}, CheckpointError, "high_freq_factor"),
        ("phi3", {"rope_parameters": LONGROPE_SHORT_LIST}, CheckpointError, "1 factors for 6"),
        ("phi3", {"rope_parameters": ODD_ROTARY}, CheckpointError, "gives 3 rotary"),
        ("gemma2", {"use_bidirectional_attention": True}, UnsupportedError, "bidirectional"),
        ("gemma2", {"layer_types": ["chunked_attention"] * 4}, UnsupportedError, "chunked"),
        ("gemma2", {"layer_types": ["full_attention"]}, CheckpointError, "names 1 layers of 4"),
        ("gemma2", {"hidden_activation": "gelu"}, UnsupportedError, "'gelu'"),
        ("mixtral", {"num_local_experts": ...}, CheckpointError, "num_local_experts: is missing"),
        ("lfm2", {"layer_types": ["sliding_attention"] * 5}, UnsupportedError, "sliding"),
        ("lfm2", {"layer_types": ["conv"]}, CheckpointError, "names 1 layers of 5"),
        ("lfm2", {"layer_types": [["conv"]] * 5}, UnsupportedError, "a list of 1"),
        ("lfm2", {"conv_L_cache": 1}, CheckpointError, "conv_L_cache: is 1"),
        ("lfm2", LFM2_ENORMOUS, CheckpointError, "intermediate size of 697651904"),
        ("qwen3_5", {"layer_types": ["sliding_attention"] * 4}, UnsupportedError, "sliding"),
        ("qwen3_5", {"layer_types": ["linear_attention"]}, CheckpointError, "names 1 layers of 4"),
        ("qwen3_5", {"layer_types": ..., "full_attention_interval": 0}, CheckpointError, "is 0"),
        ("qwen3_5", {"linear_conv_kernel_dim": 0}, CheckpointError, "conv_kernel_dim: is 0"),
        ("qwen3_5", {"linear_conv_kernel_dim": 1}, CheckpointError, "conv_kernel_dim: is 1"),
        ("qwen3_5", {"linear_num_key_heads": 3}, CheckpointError, "3 does not divide linear_num"),
        ("qwen3_5", {"linear_num_value_heads": 10**9}, CheckpointError, "at most 4096"),
        ("qwen3_5", {"linear_key_head_dim": 513}, CheckpointError, "at most 512"),
        ("qwen3_5", {"linear_value_head_dim": -1}, CheckpointError, "value_head_dim: is -1"),
        ("qwen3_5", {"hidden_act": "gelu_pytorch_tanh"}, UnsupportedError, "hidden_act: 'gelu"),
        ("mixtral", {"num_experts_per_tok": 5}, CheckpointError, "is 5, and there are 4 experts"),
        ("qwen2_moe", {"mlp_only_layers": ["0"]}, CheckpointError, "has '0', not the number"),
        ("glm4_moe", {"n_group": 3}, CheckpointError, "n_group: is 3, which makes no equal groups"),
        ("glm4_moe", {"n_group": 8}, CheckpointError, "n_group: is 8, which makes no equal groups"),
        ("glm4_moe", {"n_group": 10**9}, CheckpointError, "n_group: is 1000000000, not an integer"),
        ("glm4_moe", {"topk_group": 5}, CheckpointError, "topk_group: is 5, and there are 4"),
        ("glm4_moe", {"num_experts_per_tok": 5}, CheckpointError, "2 groups have 4 experts"),
        ("glm4_moe", {"n_routed_experts": 10**6}, CheckpointError, "n_routed_experts: is 1000000"),
        ("glm4_moe", {"routed_scaling_factor": 0}, CheckpointError, "routed_scaling_factor: is 0"),
        ("minimax_m2", {"scoring_func": "softmax"}, UnsupportedError, "scoring_func: 'softmax'"),
        ("ernie4_5_moe", {"use_bias": True}, UnsupportedError, "use_bias: True"),
        ("ernie4_5_moe", {"moe_k": 7}, CheckpointError, "is 7, and there are 6 experts"),
        ("ernie4_5_moe", {"moe_norm_min": 1.0}, CheckpointError, "moe_norm_min: is 1.0"),
        ("qwen3_5_moe", {"num_experts": 10**6}, CheckpointError, "num_experts: is 1000000"),
        ("qwen3_5_moe", {"num_experts_per_tok": 7}, CheckpointError, "there are 6 experts"),
        ("qwen3_5_moe", {"shared_expert_intermediate_size": 0}, CheckpointError, "size: is 0"),
        ("qwen3_next", {"mlp_only_layers": ["1"]}, CheckpointError, "not the number of a layer"),
        ("kimi_linear", {"layer_types": ["conv"] * 3}, UnsupportedError, "'conv'"),
        ("kimi_linear", {"mlp_layer_types": ["dense"]}, CheckpointError, "names 1 layers of 3"),
        ("kimi_linear", {"linear_head_dim": 513}, CheckpointError, "at most 512"),
        ("kimi_linear", {"linear_num_heads": 0}, CheckpointError, "linear_num_heads: is 0"),
        ("kimi_linear", {"linear_attn_config": [1]}, CheckpointError, "a list of 1, not an object"),
        ("kimi_linear", kimi_linear(gate_lower_bound=-5.0), UnsupportedError, "bound: -5.0"),
        ("kimi_linear", kimi_linear(use_full_rank_gate=True), UnsupportedError, "gate: True"),
        ("kimi_linear", kimi_linear(kda_layers=["1"]), CheckpointError, "not the number of a"),
        ("kimi_linear", kimi_linear(kda_layers=[1, 2]), CheckpointError, "each of 3 layers once"),
        ("kimi_linear", kimi_linear(num_heads=10**9), CheckpointError, "at most 4096"),
        ("kimi_linear", {"qk_rope_head_dim": 7}, UnsupportedError, "is 7, an odd number"),
        ("kimi_linear", {"mla_use_nope": False}, UnsupportedError, "mla_use_nope: False"),
        ("kimi_linear", {"num_expert_group": 3}, CheckpointError, "makes no equal groups"),
        ("kimi_linear", {"use_grouped_topk": False}, UnsupportedError, "n_group: 4"),
        (
            "kimi_linear",
            {"moe_router_activation_func": "softmax"},
            UnsupportedError,
            "activation_func: 'softmax'",
        ),
        ("granite_moe_hybrid", {"layer_types": ["conv"] * 3}, UnsupportedError, "'conv'"),
        ("granite_moe_hybrid", {"layer_types": [["mamba"]] * 3}, UnsupportedError, "a list of 1"),
        ("granite_moe_hybrid", {"layer_types": ["mamba"]}, CheckpointError, "names 1 layers of 3"),
        ("granite_moe_hybrid", {"hidden_act": "gelu"}, UnsupportedError, "hidden_act: 'gelu'"),
        ("granite_moe_hybrid", {"mamba_d_state": 10**9}, CheckpointError, "at most 512"),
        ("granite_moe_hybrid", {"mamba_d_head": 513}, CheckpointError, "at most 512"),
        ("granite_moe_hybrid", {"mamba_d_head": 24}, CheckpointError, "8 heads of 24"),
        ("granite_moe_hybrid", {"mamba_n_heads": 7}, CheckpointError, "mamba_n_heads: makes 7"),
        ("granite_moe_hybrid", {"mamba_n_heads": 10**9}, CheckpointError, "at most 4096"),
        ("granite_moe_hybrid", {"mamba_n_groups": 3}, CheckpointError, "3 does not divide the 8"),
        ("granite_moe_hybrid", {"mamba_expand": 10**6}, CheckpointError, "at most 64"),
        ("granite_moe_hybrid", {"mamba_d_conv": 1}, CheckpointError, "mamba_d_conv: is 1"),
        ("granite_moe_hybrid", {"time_step_limit": [1]}, CheckpointError, "time_step_limit: is"),
        ("granite_moe_hybrid", {"time_step_limit": [1, 0]}, CheckpointError, "in their order"),
        ("granite_moe_hybrid", {"time_step_limit": [0, 10**400]}, CheckpointError, "two numbers"),
        ("granite_moe_hybrid", {"time_step_limit": [{}, "inf"]}, CheckpointError, "two numbers"),
        ("jamba", {"attn_layer_offset": 3}, CheckpointError, "is 3, not below attn_layer_period 3"),
        ("jamba", {"expert_layer_period": 0}, CheckpointError, "expert_layer_period: is 0"),
        ("jamba", {"mamba_d_conv": 1}, CheckpointError, "mamba_d_conv: is 1"),
        ("jamba", {"mamba_d_state": 12}, UnsupportedError, "is 12, no multiple of 8"),
        ("jamba", {"mamba_d_state": 10**9}, CheckpointError, "at most 512"),
        ("jamba", {"mamba_dt_rank": "large"}, CheckpointError, "mamba_dt_rank: is 'large'"),
        ("jamba", {"mamba_expand": -1}, CheckpointError, "mamba_expand: is -1"),
        ("jamba", {"hidden_act": "gelu"}, UnsupportedError, "hidden_act: 'gelu'"),
        ("jamba", {"num_experts_per_tok": 6}, CheckpointError, "there are 5 experts"),
        ("nemotron_h", {"layers_block_type": ["conv"]}, UnsupportedError, "'conv'"),
        ("nemotron_h", {"layers_block_type": []}, CheckpointError, "names 0 layers"),
        ("nemotron_h", {"layers_block_type": ["mlp"] * 1025}, CheckpointError, "1025 layers"),
        ("nemotron_h", {**NO_KINDS, "hybrid_override_pattern": "MX"}, UnsupportedError, "'MX'"),
        ("nemotron_h", {**NO_KINDS, "hybrid_override_pattern": 3}, UnsupportedError, "is 3"),
        ("nemotron_h", {**NO_KINDS, "hybrid_override_pattern": ""}, CheckpointError, "0 layers"),
        ("nemotron_h", {"ssm_state_size": 10**9}, CheckpointError, "at most 512"),
        ("nemotron_h", {"mamba_head_dim": 513}, CheckpointError, "at most 512"),
        ("nemotron_h", {"mamba_num_heads": -8}, CheckpointError, "mamba_num_heads: is -8"),
        ("nemotron_h", {"n_groups": 3}, CheckpointError, "n_groups: 3 does not divide the 8"),
        ("nemotron_h", {"conv_kernel": 65}, CheckpointError, "at most 64"),
        ("nemotron_h", {"mamba_hidden_act": "gelu"}, UnsupportedError, "mamba_hidden_act: 'gelu'"),
        ("nemotron_h", {"mlp_hidden_act": "gelu"}, UnsupportedError, "mlp_hidden_act: 'gelu'"),
        ("nemotron_h", {"tie_word_embeddings": True}, UnsupportedError, "tie_word_embeddings"),
        ("nemotron_h_moe", {"moe_latent_size": 0}, CheckpointError, "moe_latent_size: is 0"),
        ("nemotron_h_moe", {"moe_latent_size": 10**9}, CheckpointError, "at most 131072"),
        ("nemotron_h_moe", {"num_experts_per_tok": 7}, CheckpointError, "there are 6 experts"),
        ("nemotron_h_moe", MANY_EXPERTS, CheckpointError, "131072 together"),
        ("granite_moe_hybrid", {"num_local_experts": -1}, CheckpointError, "experts: is -1"),
        ("ministral3", {"rope_parameters": [1]}, CheckpointError, "not an object"),
        ("deepseek_v3", {"n_routed_experts": 10**9}, CheckpointError, "n_routed_experts: is 1000"),
        ("deepseek_v3", {"topk_group": 5}, CheckpointError, "topk_group: is 5, and there are 4"),
        ("deepseek_v3", {"q_lora_rank": -1}, CheckpointError, "q_lora_rank: is -1"),
        ("deepseek_v3", {"kv_lora_rank": -8}, CheckpointError, "kv_lora_rank: is -8"),
        ("deepseek_v3", {"kv_lora_rank": 44}, UnsupportedError, "no multiple of 8"),
        ("deepseek_v3", {"qk_rope_head_dim": 0}, CheckpointError, "qk_rope_head_dim: is 0"),
        ("deepseek_v3", {"first_k_dense_replace": -1}, CheckpointError, "replace: is -1"),
        ("deepseek_v3", {"moe_layer_freq": 2}, UnsupportedError, "moe_layer_freq: 2"),
        ("deepseek_v3", {"scoring_func": "softmax"}, UnsupportedError, "scoring_func"),
        ("deepseek_v3", {"topk_method": "greedy"}, UnsupportedError, "topk_method: 'greedy'"),
        ("deepseek_v3", {"n_shared_experts": 10**9}, CheckpointError, "at most 64"),
        ("deepseek_v32", {"index_topk": 0}, CheckpointError, "index_topk: is 0"),
        ("deepseek_v32", {"index_topk": 10**9}, CheckpointError, "at most 65536"),
        ("deepseek_v32", {"index_n_heads": 10**9}, CheckpointError, "at most 1024"),
        ("deepseek_v32", {"index_head_dim": 8}, UnsupportedError, "less than qk_rope_head_dim 16"),
        ("deepseek_v32", {"index_head_dim": 20}, UnsupportedError, "is 20, no multiple of 8"),
        ("deepseek_v32", {"q_lora_rank": None}, CheckpointError, "q_lora_rank: is missing"),
        ("deepseek_v32", {"rope_interleave": False}, UnsupportedError, "rope_interleave: False"),
        ("deepseek_v32", {"indexer_rope_interleave": True}, UnsupportedError, "interleave: True"),
        ("glm_moe_dsa", {"indexer_rope_interleave": False}, UnsupportedError, "interleave: False"),
        ("glm_moe_dsa", {"indexer_types": ["full"]}, CheckpointError, "names 1 layers of 4"),
        ("glm_moe_dsa", {"indexer_types": ["shared"] * 4}, CheckpointError, "first layer shared"),
        ("glm_moe_dsa", {"indexer_types": ["own"] * 4}, UnsupportedError, "'own' is not"),
        ("glm_moe_dsa", {"indexer_types": 3}, CheckpointError, "indexer_types: is 3, not a list"),
        ("glm_moe_dsa", GLM_PATTERN, UnsupportedError, "index_topk_pattern: layer type 'X'"),
        ("deepseek_v2", {"norm_topk_prob": True}, UnsupportedError, "norm_topk_prob: True"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, UnsupportedError, "topk_method: 'noaux_tc'"),
        ("deepseek_v2", {"topk_group": 9}, CheckpointError, "topk_group: is 9, and there are 4"),
        ("deepseek_v2", {"num_experts_per_tok": ...}, CheckpointError, "per_tok: is missing"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense"]}, CheckpointError, "names 1 layers of 2"),
        ("glm4_moe_lite", {"mlp_layer_types": [["dense"]] * 2}, UnsupportedError, "a list of 1"),
        ("mistral4", {"n_group": 8}, CheckpointError, "n_group: is 8, which makes no equal groups"),
        ("mistral4", {"rope_parameters": HALF_ROTARY}, UnsupportedError, "rotary_factor: 0.5"),
        ("smollm3", {"no_rope_layers": [1]}, CheckpointError, "names 1 layers of 4"),
        ("smollm3", {"no_rope_layers": [1, 0, 2, 1]}, CheckpointError, "has 2, not 0 or 1"),
        ("exaone4", EXAONE4_PATTERN, UnsupportedError, "'LLG' is not supported"),
        ("olmo3", {"layer_types": ["chunked_attention"] * 4}, UnsupportedError, "chunked"),
        ("ministral", {"layer_types": ["sliding_attention"]}, CheckpointError, "names 1 layers"),
        ("cwm", {"layer_types": ["chunked_attention"] * 2}, UnsupportedError, "chunked"),
        ("cwm", {"sliding_window": 0}, CheckpointError, "sliding_window: is 0"),
        ("youtu", {"kv_lora_rank": 0}, CheckpointError, "kv_lora_rank: is 0"),
        ("olmo_hybrid", {"layer_types": ["sliding_attention"] * 4}, UnsupportedError, "sliding"),
        ("olmo_hybrid", {"layer_types": ["full_attention"]}, CheckpointError, "names 1 layers"),
        ("olmo_hybrid", {"linear_num_key_heads": 3}, CheckpointError, "3 does not divide linear"),
        ("olmo_hybrid", {"linear_num_value_heads": 10**9}, CheckpointError, "at most 4096"),
        ("olmo_hybrid", {"linear_key_head_dim": 513}, CheckpointError, "at most 512"),
        ("olmo_hybrid", {"linear_value_head_dim": 0}, CheckpointError, "value_head_dim: is 0"),
        ("olmo_hybrid", {"linear_conv_kernel_dim": 1}, CheckpointError, "kernel_dim: is 1"),
        ("olmo_hybrid", {"linear_allow_neg_eigval": 2}, CheckpointError, "neg_eigval: is 2"),
        ("olmo_hybrid", {"hidden_act": "relu"}, UnsupportedError, "hidden_act: 'relu'"),
        ("olmo_hybrid", {"rope_parameters": [1]}, CheckpointError, "a list of 1, not an object"),
        (
            "olmo_hybrid",
            {"linear_key_head_dim": ..., "linear_num_key_heads": 64, "hidden_size": 64},
            CheckpointError,
            "linear_key_head_dim: is 0",
        ),
        ("olmoe", {"clip_qkv": 8.0}, UnsupportedError, "clip_qkv: 8.0"),
        (
            "gemma4_e",
            {"num_kv_shared_layers": 6},
            CheckpointError,
            "leaves no layer before layer 1",
        ),
        (
            "gemma4_e",
            {"num_kv_shared_layers": 8},
            CheckpointError,
            "leaves no layer before layer 0",
        ),
        ("llama4", {"layer_types": ["sliding_attention"] * 4}, UnsupportedError, "sliding"),
        ("llama4", {"layer_types": [["full_attention"]] * 4}, UnsupportedError, "a list of 1"),
        ("llama4", {"no_rope_layers": [1, 0]}, CheckpointError, "names 2 layers of 4"),
        ("llama4", {"attention_chunk_size": 0}, CheckpointError, "chunk_size: is 0"),
        ("llama4", {"floor_scale": 0}, CheckpointError, "floor_scale: is 0"),
        ("llama4", {"attn_scale": float("nan")}, CheckpointError, "attn_scale: is nan"),
        ("llama4", {"attn_temperature_tuning": "yes"}, CheckpointError, "tuning: is 'yes'"),
        ("llama4", {"moe_layers": ["0"]}, CheckpointError, "moe_layers: has '0'"),
        ("llama4", LLAMA4_NO_STEP, CheckpointError, "layer_step: is 0"),
        ("llama4", {"num_experts_per_tok": 6}, CheckpointError, "there are 5 experts"),
        ("llama4", {"num_local_experts": 10**9}, CheckpointError, "at most 4096"),
        ("llama4", {"intermediate_size_mlp": 10**9}, CheckpointError, "at most 1048576"),
        ("gemma4_moe", {"top_k_experts": 7}, CheckpointError, "is 7, and there are 6 experts"),
        ("gemma4_moe", {"num_experts": None}, CheckpointError, "num_experts: is missing"),
        ("gemma4_moe", {"moe_intermediate_size": 0}, CheckpointError, "size: is 0"),
        ("gemma4_e", {"vocab_size_per_layer_input": 9}, CheckpointError, "vocab_size is 160"),
        ("gemma4", {"use_bidirectional_attention": "all"}, UnsupportedError, "attention: 'all'"),
        ("gemma4", {"per_layer_config": GEMMA4_HEADS}, UnsupportedError, "64 of layer 5"),
        ("gemma4", {"per_layer_config": GEMMA4_MLPS}, UnsupportedError, "'intermediate_size' of"),
        ("gemma4", {"per_layer_config": [1]}, CheckpointError, "per_layer_config: is a list of 1"),
        (
            "gemma4",
            {"per_layer_config": {"x": {}}},
            CheckpointError,
            "names 'x', which is no layer",
        ),
        ("gemma4", {"per_layer_config": {"2": {"head_dim": 0}}}, CheckpointError, "head_dim: is 0"),
        ("cohere", {"use_qk_norm": True}, UnsupportedError, "use_qk_norm: True"),
        ("stablelm", {"qk_layernorm": True}, UnsupportedError, "qk_layernorm: True"),
        ("nemotron", {"hidden_act": "relu"}, UnsupportedError, "'relu'"),
        ("granite", {"residual_multiplier": 0}, CheckpointError, "residual_multiplier: is 0"),
    ],
)
def test_refused_by_name(
    family: str, fields: dict[str, Any], error: type[TrtcError], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        decoder_spec(config_of(family, **fields), 64)
    assert caught.value.field


@pytest.mark.parametrize("length", [0, 257])
def test_a_length_that_the_model_does_not_have(length: int) -> None:
    with pytest.raises(RequestError, match="max_position_embeddings 256"):
        decoder_spec(config_of("llama"), length)


def test_an_unknown_architecture_names_the_nearest() -> None:
    with pytest.raises(UnsupportedError) as caught:
        decoder_spec({"architectures": ["Olmo4ForCausalLM"]}, 64)
    assert {"Olmo2ForCausalLM", "Olmo3ForCausalLM"} <= set(
        caught.value.remedy.replace(",", "").split()
    )
    with pytest.raises(UnsupportedError, match=r"lists what trtc builds$"):
        decoder_spec({"architectures": ["x" * 1_000_000]}, 64)


def test_every_architecture_has_a_tiny_checkpoint() -> None:
    """Those for conditional generation wrap text models that have one; another name has the graph
    of one."""
    tested = {architecture_of(family) for family in FAMILIES}
    wrappers = {
        "Gemma3ForConditionalGeneration",
        "Gemma4ForConditionalGeneration",
        "Gemma4UnifiedForConditionalGeneration",
        "Llama4ForConditionalGeneration",
        "KimiK25ForConditionalGeneration",
        "Kimi_K25ForConditionalGeneration",
        "Mistral3ForConditionalGeneration",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
    }
    other_names = {"InternLM3ForCausalLM", "PhiMoEForCausalLM"}
    assert set(ARCHITECTURES) - wrappers - other_names <= tested


def test_the_heads_of_every_layer_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    def family(config: Config, max_seq_len: int) -> DecoderSpec:
        spec = llama(config, max_seq_len)
        last = spec.layers[-1]
        odd = replace(last, mixer=replace(last.attention, num_heads=5))
        return replace(spec, layers=(*spec.layers[:-1], odd))

    monkeypatch.setattr(registry, "FAMILIES", {"LlamaForCausalLM": family})
    last = len(llama(Config(config_of("llama")), 64).layers) - 1
    with pytest.raises(CheckpointError, match=f"2 does not divide the 5 heads of layer {last}"):
        decoder_spec(config_of("llama"), 64)
