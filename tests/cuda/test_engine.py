"""A whole CUDA engine on the CPU: its own launch plan, kernels interpreted, against the graph.

Addresses, strides, grids, padding of buckets, page tables and the order of calls are those that a
GPU would see; memory starts as NaN, so that whatever is read before it was written shows.
"""

import functools
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import pytest

from tests.support.cuda_engines import lower_dummy
from tests.support.engines import NUM_PAGES, engine_stepper
from tests.support.models import random_prompt
from tests.support.steps import Stepper
from tests.support.triton_kernels import in_interpreter, needs_triton
from trtc.protos.manifest import WEIGHTS_FILE
from trtc.quant.scheme import SCHEMES
from trtc.runtime.engine.probe import solo_batch
from trtc.runtime.executors.weights import map_weights

needs_triton()

WINDOWS = {"num_hidden_layers": 2, "sliding_window_pattern": 2, "sliding_window": 8, "head_dim": 16}
"""Of a Gemma 3 with one window layer and a full one, whose window longer sequences leave by whole
pages."""
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "qwen3_moe": {},
    "qwen2_moe": {"num_hidden_layers": 2, "use_sliding_window": False},
    "gemma3": WINDOWS,
    "gemma4": {
        "num_hidden_layers": 2,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gemma4_moe": {"sliding_window": 8, "num_experts": 4},
    "gemma4_e": {
        "num_hidden_layers": 3,
        "sliding_window": 8,
        "num_kv_shared_layers": 1,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    },
    "lfm2": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
    "qwen3_5": {
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "kimi_linear": {
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
    },
    "olmo_hybrid": {
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "olmo3": {
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 8,
    },
    "nemotron": {},
    "hunyuan_dense": {"num_hidden_layers": 1},
    "phimoe": {"num_hidden_layers": 1, "sliding_window": None},
    "gpt_oss": {"num_hidden_layers": 2, "sliding_window": 8},
    "llama4": {
        "num_hidden_layers": 2,
        "attention_chunk_size": 8,
        "no_rope_layers": [1, 0],
        "moe_layers": [1],
        "layer_types": ["chunked_attention", "full_attention"],
    },
    "ministral3": {"num_hidden_layers": 1},
    "cohere2": {"num_hidden_layers": 1, "layer_types": ["full_attention"]},
    "deepseek_v3": {"num_hidden_layers": 1, "first_k_dense_replace": 0},
    "glm_moe_dsa": {
        "num_hidden_layers": 2,
        "mlp_layer_types": ["dense", "dense"],
        "indexer_types": ["full", "shared"],
    },
    "granite_moe_hybrid": {
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "num_local_experts": 4,
    },
    "jamba": {"num_hidden_layers": 2, "attn_layer_period": 2, "num_experts": 4},
    "nemotron_h_moe": {
        "layers_block_type": ["linear_attention", "moe", "full_attention"],
        "n_routed_experts": 4,
    },
    "smollm3": {"num_hidden_layers": 2, "no_rope_layers": [1, 0], "use_sliding_window": False},
}
"""One without and one with norms of q and k, one with routed experts, one with a gated shared one
too, one with windows and full attention, rope by layer type, scaled embeddings and norms on both
sides of a layer's parts, one with layers that differ in heads, one with experts beside an MLP that
each have norms, one with an input of each layer and one layer that reads another's keys, one with
short convolutions, whose states lie side by side in the pool; one with delta nets, whose layers
have two states, and a gate behind attention; one with delta nets that decay by channel beside
latent attention that has no rotary embedding; one with delta nets whose eigenvalues may be
negative, before attention with norms after; one with norms after a layer's parts and over all
heads, one with sinks and biased experts, one with LayerNorm and squared ReLU without a gate, one
with attention and MLP side by side, one with queries scaled by their position, one with latent
attention before experts that a sigmoid router chooses by groups, one with latent attention to
tokens that it or an earlier layer selects, one with Mamba-2 layers, one
with Mamba's, one whose layers are of one part each, with latent experts that have no gate, one
with norms of q and k after rope, one with a SparseMixer and a bias of the lm_head, one with layers
that have no rotary embedding, and one that attends within chunks before experts of weighted
inputs."""


def run_both(family: str, scheme: str, directory: str, **options: Any) -> dict[str, Any]:
    """Logits of engine and evaluator over prefills, chunks, and mixed and pure decode steps: the
    error of each row, ascending."""
    lowered = lower_dummy(family, SCHEMES[scheme], Path(directory), **options)
    engine = engine_stepper(lowered.executor)
    expected = Stepper(lowered.evaluator.run, lowered.kv, NUM_PAGES, scramble=1)
    first, second = random_prompt(11, seed=1), random_prompt(21, seed=2)
    errors: list[float] = []
    for chunks in (
        {"a": first},
        {"a": [5], "b": second[:13]},
        {"a": [6], "b": second[13:], "c": [9, 10, 11]},
        {"a": [7], "b": [8], "c": [12]},
        {"c": [3]},
    ):
        found, wanted = engine.step(chunks), expected.step(chunks)
        for name in chunks:
            off = np.abs(found[name] - wanted[name]).reshape(-1, wanted[name].shape[-1])
            errors += (off.max(axis=1) / np.abs(wanted[name]).max()).tolist()
    return {
        "errors": sorted(errors),
        "launched": sorted(set(lowered.launched)),
        "windows": lowered.kv.windows,
    }


def errors_of_a_step(scheme: str, directory: str, break_layer: bool) -> list[str]:
    """What examples/bench/gpu.py prints where a token differs, and the largest error."""
    from examples.bench.gpu_layers import describe, errors_by_call

    lowered = lower_dummy("llama", SCHEMES[scheme], Path(directory))
    if break_layer:
        calls = lowered.executor.program.calls
        by_site = {call.site: call for call in calls}
        wrong = msgspec.structs.replace(
            by_site["layers.1.mlp.down"], variants=by_site["layers.0.mlp.down"].variants
        )
        lowered.executor.program.calls = tuple(
            wrong if call.site == wrong.site else call for call in calls
        )
    tokens = random_prompt(11, seed=1)
    return list(
        describe(errors_by_call(Path(directory) / "engine", lowered.executor, tokens), 0.01)
    )


def logits_by_chunks(directory: str) -> tuple[list[tuple[int, ...]], float]:
    """Shapes of logits of chunks that ask for none and for one; how far the last is from those of
    the whole at once, in the same pages."""
    executor = lower_dummy("llama", SCHEMES["fp32"], Path(directory)).executor
    tokens = np.array(random_prompt(20, seed=1), np.int32)
    whole = executor.logits(solo_batch(executor, tokens, 0, [19]))
    other = np.array(random_prompt(20, seed=2), np.int32)
    executor.logits(solo_batch(executor, other, 0, [19]))
    first = executor.logits(solo_batch(executor, tokens[:12], 0, []))
    last = executor.logits(solo_batch(executor, tokens[12:], 12, [7]))
    return [first.shape, last.shape], float(np.abs(last - whole).max())


def test_a_step_without_logit_rows_fills_the_cache(tmp_path: Path) -> None:
    shapes, error = in_interpreter(logits_by_chunks, str(tmp_path))
    assert [len(first) for first in shapes] == [2, 2]
    assert [rows for rows, _ in shapes] == [0, 1]
    assert shapes[0][1] == shapes[1][1] > 0
    assert error < 1e-5


def weights_on_the_host(directory: str) -> list[bool]:
    """Whether they are those of the file, fetched in pieces; whether a step changes them."""
    from trtc.runtime.executors.cuda import program

    executor = lower_dummy("llama", SCHEMES["fp32"], Path(directory)).executor
    (file,) = Path(directory).rglob(WEIGHTS_FILE)
    with patch.object(program, "_PIECE_BYTES", 10_007):
        before = executor.weights_on_host()
    executor.logits(solo_batch(executor, np.array([5, 6], np.int32), 0, [1]))
    after = executor.weights_on_host()
    of_file = map_weights(file, len(before))
    return [executor.keeps_weights, np.array_equal(before, of_file), np.array_equal(before, after)]


def test_weights_come_back_from_the_device_as_they_are_in_their_file(tmp_path: Path) -> None:
    assert in_interpreter(weights_on_the_host, str(tmp_path)) == [True, True, True]


def moved_pages(directory: str) -> list[bool]:
    """Whether logits stay bit for bit what they were when a context's pages are read, lost, and
    written into others; whether they change when pages are not written."""
    executor = lower_dummy("llama", SCHEMES["fp32"], Path(directory)).executor
    size, prompt = executor.kv.page_size, random_prompt(20, seed=1)
    tokens = np.array(prompt, np.int32)
    executor.logits(solo_batch(executor, tokens[: 2 * size], 0, [0]))
    following = solo_batch(executor, tokens[2 * size :], 2 * size, range(20 - 2 * size))
    expected = executor.logits(following)
    table = following.page_table.copy()
    old = table[:, :2].reshape(-1).tolist()
    data = executor.read_pages(old).wait()
    executor.write_pages(old, np.zeros_like(data))
    lost = executor.logits(following)
    table[:, :2] = np.arange(20, 20 + len(old)).reshape(-1, 2)
    executor.write_pages(table[:, :2].reshape(-1).tolist(), data)
    found = executor.logits(msgspec.structs.replace(following, page_table=table))
    return [bool((found == expected).all()), bool((lost == expected).all())]


def test_pages_written_back_elsewhere_continue_alike(tmp_path: Path) -> None:
    assert in_interpreter(moved_pages, str(tmp_path)) == [True, False]


@pytest.mark.parametrize("broken", [False, True])
def test_errors_are_told_by_layer(broken: bool, tmp_path: Path) -> None:
    lines = in_interpreter(errors_of_a_step, "fp32", str(tmp_path), broken)
    assert lines[0].startswith("embedding 0.0000, layer 0 0.0000, layer 1 ")
    assert len(lines) == 1 + broken
    if broken:
        assert lines[1].startswith("first beyond 0.0100: layers.1.mlp.down")


@pytest.mark.parametrize("family", FAMILIES)
def test_an_fp32_engine_is_its_graph(family: str, tmp_path: Path) -> None:
    options = FAMILIES[family]
    result = in_interpreter(functools.partial(run_both, **options), family, "fp32", str(tmp_path))
    assert result["errors"][-1] < 1e-5
    assert len(result["launched"]) >= 6, "the engine ran other kernels than its own"
    slid = ("gemma3", "gemma4", "olmo3", "gpt_oss", "llama4")
    windows = dict.fromkeys(slid, (None, 8)) | dict.fromkeys(
        (
            "lfm2",
            "qwen3_5",
            "kimi_linear",
            "olmo_hybrid",
            "granite_moe_hybrid",
            "jamba",
            "nemotron_h_moe",
        ),
        (None, 0),
    )
    assert result["windows"] == windows.get(family, (None,))


@pytest.mark.parametrize(("kv_dtype", "step"), [("i8", 1e-2), ("i4", 1e-1)])
def test_keys_and_values_with_scales_are_those_of_the_graph(
    kv_dtype: str, step: float, tmp_path: Path
) -> None:
    """But for one that falls to the other of two codes."""
    run = functools.partial(run_both, kv_dtype=kv_dtype, num_hidden_layers=1)
    result = in_interpreter(run, "llama", "fp32", str(tmp_path))
    assert result["errors"][len(result["errors"]) // 2] < 1e-5
    assert result["errors"][-1] < step


def run_mxfp4(directory: str, sm: int) -> dict[str, Any]:
    sizes = {"num_hidden_layers": 1, "sliding_window": 8}
    sizes |= {"hidden_size": 64, "intermediate_size": 64}
    return run_both("gpt_oss", "mxfp4", directory, sm=sm, native=True, **sizes)


@pytest.mark.slow
@pytest.mark.parametrize(("sm", "kernel"), [(80, "gate_up"), (90, "experts_e2m1")])
def test_an_engine_of_mxfp4_experts_is_its_graph(sm: int, kernel: str, tmp_path: Path) -> None:
    """Rounding to bf16 aside, and a router that is tipped by it."""
    result = in_interpreter(run_mxfp4, str(tmp_path), sm)
    assert result["errors"][-2] < 0.03
    assert kernel in result["launched"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "sm", "kernel"),
    [
        ("mxfp4_weights", 80, "mixed_input_gemm"),
        ("nvfp4_weights", 80, "multiply_mixed_input"),
    ],
)
def test_an_engine_of_e2m1_linears_is_its_graph(
    scheme: str, sm: int, kernel: str, tmp_path: Path
) -> None:
    """Rounding to bf16 aside."""
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 128}
    run = functools.partial(run_both, sm=sm, native=True, num_hidden_layers=1, **sizes)
    result = in_interpreter(run, "llama", scheme, str(tmp_path))
    assert result["errors"][-1] < 0.03
    assert kernel in result["launched"]


@pytest.mark.slow
def test_an_engine_of_nvfp4_experts_is_its_graph(tmp_path: Path) -> None:
    """Rounding to bf16 aside, and a router that is tipped by it."""
    sizes: dict[str, Any] = {"num_hidden_layers": 1, "mlp_only_layers": [], "hidden_size": 64}
    run = functools.partial(run_both, sm=90, native=True, **sizes)
    result = in_interpreter(run, "qwen3_moe", "nvfp4_weights", str(tmp_path))
    assert result["errors"][-2] < 0.03
    assert "gate_up" in result["launched"] and "experts_e2m1" not in result["launched"]


BY_ROW: dict[str, tuple[str, dict[str, Any]]] = {
    "int8_dynamic": ("qwen3_moe", {"num_hidden_layers": 1}),
    "int8_hadamard": (
        "qwen3_moe",
        {
            "num_hidden_layers": 1,
            "hidden_size": 128,
            "intermediate_size": 128,
            "moe_intermediate_size": 64,
        },
    ),
    "fp8_blocks": (
        "llama",
        {"num_hidden_layers": 1, "hidden_size": 256, "intermediate_size": 256},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("scheme", BY_ROW)
def test_an_engine_whose_rows_have_scales_is_its_graph(scheme: str, tmp_path: Path) -> None:
    """Rounding aside: in bf16 a number between two codes may go to either."""
    family, sizes = BY_ROW[scheme]
    run = functools.partial(run_both, sm=89, native=True, **sizes)
    result = in_interpreter(run, family, scheme, str(tmp_path))
    assert np.median(result["errors"]) < 0.03 and result["errors"][-1] < 0.15
    assert "quantize_rows" in result["launched"]


def run_native(family: str, directory: str, **sizes: int) -> dict[str, Any]:
    """The same with the kernels in CUDA C++, of a model as small as 4-bit weights may be."""
    return run_both(
        family,
        "int4_awq",
        directory,
        sm=80,
        native=True,
        num_hidden_layers=1,
        hidden_size=128,
        **sizes,
    )


def run_experts(directory: str) -> dict[str, Any]:
    return run_native("qwen3_moe", directory, moe_intermediate_size=128)


def run_dense(directory: str) -> dict[str, Any]:
    return run_native("llama", directory, intermediate_size=128)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "kernel", "near_ties"), [(run_dense, "mixed_input_gemm", 0), (run_experts, "route", 1)]
)
def test_an_engine_of_4_bit_weights_is_its_graph(
    run: Any, kernel: str, near_ties: int, tmp_path: Path
) -> None:
    """Rounding to bf16 aside: products sum in another order. Where that tips a router that hardly
    prefers one expert to the next, a row gets other experts; in fp32 none does (above)."""
    result = in_interpreter(run, str(tmp_path))
    assert result["errors"][-1 - near_ties] < 0.03
    assert kernel in result["launched"]
