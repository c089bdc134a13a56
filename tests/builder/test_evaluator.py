"""The reference evaluator: every operator that it implements itself, and how it runs steps."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from onnx import helper

from tests.support.caches import new_pools, uniform_layout
from tests.support.evaluate import LIMITS, source_module
from tests.support.models import random_prompt, tiny_checkpoint
from tests.support.steps import Pages
from trtc.builder.evaluator import Evaluator
from trtc.builder.module import OPSET, TENSORRT_DOMAIN, TRTC_DOMAIN, Module
from trtc.builder.recipes import Array, Constant
from trtc.plugins.rounding import NUMPY_DTYPES, cast

KV = uniform_layout(num_layers=0, page_size=8, num_kv_heads=1, head_dim=8, dtype="f32")
BF16 = np.dtype(ml_dtypes.bfloat16)


class NoReader:
    def read(self, name: str) -> Array:
        raise AssertionError(f"{name}: every weight of this test is a constant")


def run_node(node: onnx.NodeProto, inputs: dict[str, Array], weights: dict[str, Array]) -> Array:
    """One node's first output; `weights` are initialisers, external when they are large."""
    untyped = helper.make_empty_tensor_value_info
    initializers = []
    for name, values in weights.items():
        item = onnx.numpy_helper.from_array(values, name)
        if values.size > 16:
            item.ClearField("raw_data")
            item.data_location = onnx.TensorProto.EXTERNAL
        initializers.append(item)
    graph = helper.make_graph(
        [node],
        "one",
        [untyped(name) for name in inputs],
        [untyped(node.output[0])],
        initializer=initializers,
    )
    domains = ("", TRTC_DOMAIN, TENSORRT_DOMAIN)
    opsets = [helper.make_opsetid(one, 1 if one else OPSET) for one in domains]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=11)
    recipes = {name: Constant(values) for name, values in weights.items()}
    return Evaluator(Module(model, recipes, KV, LIMITS), NoReader()).run(inputs)[node.output[0]]


def run_second(node: onnx.NodeProto, inputs: dict[str, Array]) -> Array:
    """One node's second output."""
    untyped = helper.make_empty_tensor_value_info
    graph = helper.make_graph(
        [node], "one", [untyped(name) for name in inputs], [untyped(node.output[1])]
    )
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(node.domain, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=11)
    return Evaluator(Module(model, {}, KV, LIMITS), NoReader()).run(inputs)[node.output[1]]


def node(op_type: str, inputs: Sequence[str], **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op_type, inputs, ["y"], name="n", **attributes)


def noise(*shape: int, dtype: str = "f32", seed: int = 0, scale: float = 1.0) -> Array:
    values = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    return (scale * values).astype(NUMPY_DTYPES[dtype])


# --- operators -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_matmul_accumulates_in_f32_and_rounds_once(dtype: str) -> None:
    x, w = noise(5, 512, dtype=dtype), noise(512, 7, dtype=dtype, seed=1)
    found = run_node(node("MatMul", ["x", "w"]), {"x": x}, {"w": w})
    exact = x.astype(np.float64) @ w.astype(np.float64)
    assert found.dtype == x.dtype
    np.testing.assert_allclose(
        found.astype(np.float64), exact, rtol=2**-8 if dtype == "bf16" else 1e-5, atol=1e-4
    )


def test_matmul_rows_do_not_depend_on_their_neighbours() -> None:
    x, w = noise(33, 96), noise(96, 50, seed=1)
    together = run_node(node("MatMul", ["x", "w"]), {"x": x}, {"w": w})
    for index in range(33):
        alone = run_node(node("MatMul", ["x", "w"]), {"x": x[index : index + 1]}, {"w": w})
        np.testing.assert_array_equal(alone[0], together[index])


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("shape", [(4, 64), (4, 3, 16)])
def test_rms_normalization_matches_torch_in_f32(dtype: str, shape: tuple[int, ...]) -> None:
    x = noise(*shape, dtype=dtype, scale=3.0)
    w = noise(shape[-1], dtype=dtype, seed=1)
    found = run_node(
        node("RMSNormalization", ["x", "w"], axis=-1, epsilon=1e-5, stash_type=1),
        {"x": x},
        {"w": w},
    )
    exact = torch.nn.functional.rms_norm(
        torch.from_numpy(x.astype(np.float64)),
        (shape[-1],),
        torch.from_numpy(w.astype(np.float64)),
        1e-5,
    ).numpy()
    tolerance = 2**-8 if dtype == "bf16" else 1e-6
    np.testing.assert_allclose(found.astype(np.float64), exact, rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_layer_normalization_rounds_once(dtype: str) -> None:
    x, w, b = noise(3, 64, dtype=dtype), noise(64, dtype=dtype, seed=1), noise(64, seed=2)
    b = b.astype(NUMPY_DTYPES[dtype])
    found = run_node(
        node("LayerNormalization", ["x", "w", "b"], axis=-1, epsilon=1e-5, stash_type=1),
        {"x": x},
        {"w": w, "b": b},
    )
    wide_x, wide_w, wide_b = (torch.from_numpy(one.astype(np.float64)) for one in (x, w, b))
    exact = torch.nn.functional.layer_norm(wide_x, (64,), wide_w, wide_b, 1e-5).numpy()
    tolerance = 2**-8 if dtype == "bf16" else 1e-6
    np.testing.assert_allclose(found.astype(np.float64), exact, rtol=tolerance, atol=2e-6)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_sigmoid_and_gelu_match_torch_even_far_out(dtype: str) -> None:
    x = np.concatenate([noise(64, scale=3.0), [-200.0, -90.0, 0.0, 90.0, 200.0]])
    x = x.astype(NUMPY_DTYPES[dtype])
    wide = torch.from_numpy(x.astype(np.float64))
    tolerance = 2**-8 if dtype == "bf16" else 1e-5
    found = run_node(node("Sigmoid", ["x"]), {"x": x}, {})
    np.testing.assert_allclose(
        found.astype(np.float64), torch.sigmoid(wide).numpy(), rtol=tolerance, atol=1e-6
    )
    found = run_node(node("Gelu", ["x"], approximate="tanh"), {"x": x}, {})
    exact = torch.nn.functional.gelu(wide, approximate="tanh").numpy()
    np.testing.assert_allclose(found.astype(np.float64), exact, rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_quantize_linear_to_float8_is_torchs_cast_with_saturation(dtype: str) -> None:
    x = np.concatenate([noise(200, scale=2.0), [0.0, 1e6, -1e6, 8.96, 1e-9]])
    x = x.astype(NUMPY_DTYPES[dtype])
    scale = np.asarray(0.02, dtype=np.float32)
    found = run_node(
        node("QuantizeLinear", ["x", "s"], output_dtype=onnx.TensorProto.FLOAT8E4M3FN),
        {"x": x},
        {"s": scale},
    )
    scaled = torch.from_numpy(x.astype(np.float32) / scale).clamp(-448, 448)
    expected = scaled.to(torch.float8_e4m3fn).float().numpy()
    assert found.dtype == NUMPY_DTYPES["f8e4m3"]
    np.testing.assert_array_equal(found.astype(np.float32), expected)


def test_quantize_linear_to_int8_rounds_halves_to_even_and_saturates() -> None:
    x = np.asarray([0.5, 1.5, 2.5, -0.5, -1.5, 300.0, -300.0, 0.49], dtype=np.float32)
    found = run_node(
        node("QuantizeLinear", ["x", "s"], output_dtype=onnx.TensorProto.INT8),
        {"x": x},
        {"s": np.asarray(1.0, dtype=np.float32)},
    )
    assert found.dtype == np.int8 and found.tolist() == [0, 2, 2, 0, -2, 127, -128, 0]


@pytest.mark.parametrize("with_zero", [False, True])
@pytest.mark.parametrize("target", ["f32", "bf16"])
def test_blocked_4_bit_dequantisation(target: str, with_zero: bool) -> None:
    rng = np.random.default_rng(0)
    element = ml_dtypes.uint4 if with_zero else ml_dtypes.int4
    low = 0 if with_zero else -8
    codes = rng.integers(low, low + 16, (6, 64)).astype(element)
    scale = rng.uniform(0.01, 1, (6, 2)).astype(np.float32)
    zero = rng.integers(0, 16, (6, 2)).astype(element)
    weights = {"s": scale} | ({"z": zero} if with_zero else {})
    found = run_node(
        node(
            "DequantizeLinear",
            ["x", *weights],
            axis=1,
            block_size=32,
            output_dtype=onnx.TensorProto.BFLOAT16 if target == "bf16" else onnx.TensorProto.FLOAT,
        ),
        {"x": codes},
        weights,
    )
    shift = zero.astype(np.float32).repeat(32, axis=1) if with_zero else 0.0
    expected = (codes.astype(np.float32) - shift) * scale.repeat(32, axis=1)
    np.testing.assert_array_equal(found, cast(expected, target))


def test_fp4_quantisation_scales_each_block_by_what_e4m3_holds() -> None:
    """Blocks of ones to 6 units, of a largest value between two E4M3 scales, and of zeros."""
    unit = np.asarray(2.0**-8, np.float32)
    row = np.zeros((2, 48), np.float32)
    row[0, :8] = np.array([0.25, 0.75, 1.75, 2.5, -3.5, 5.0, 6.0, -6.0], np.float32) * unit
    row[0, 16:32] = 6 * 1.03 * unit  # the scale, 1.03 units, becomes one
    row[1, 47] = 1e9
    attributes = {"axis": -1, "block_size": 16, "scale_type": onnx.TensorProto.FLOAT8E4M3FN}
    quantize = helper.make_node(
        "TRT_FP4DynamicQuantize", ["x", "s"], ["y", "z"], domain="trt", name="n", **attributes
    )
    codes = run_node(quantize, {"x": cast(row, "bf16"), "s": unit}, {})
    assert codes.dtype == ml_dtypes.float4_e2m1fn
    assert codes[0, :8].astype(float).tolist() == [0.0, 1.0, 2.0, 2.0, -4.0, 4.0, 6.0, -6.0]
    assert codes[0, 16:32].astype(float).tolist() == [6.0] * 16
    assert codes[0, 32:].astype(float).tolist() == [0.0] * 16
    assert codes[1].astype(float).tolist() == [0.0] * 47 + [6.0]
    scales = run_second(quantize, {"x": cast(row, "bf16"), "s": unit})
    assert scales.astype(float).tolist() == [[1.0, 1.0, 0.0], [0.0, 0.0, 448.0]]


@pytest.mark.parametrize("rotary_dim", [16, 12])
def test_rotary_embedding_rotates_halves(rotary_dim: int) -> None:
    heads, dim, half = 3, 16, rotary_dim // 2
    x = noise(1, 5, heads * dim)
    angles = noise(20, half, seed=1)
    positions = np.asarray([[3, 4, 0, 19, 3]])
    found = run_node(
        node(
            "RotaryEmbedding",
            ["x", "c", "s", "p"],
            num_heads=heads,
            rotary_embedding_dim=rotary_dim,
            interleaved=0,
        ),
        {"x": x, "p": positions},
        {"c": np.cos(angles), "s": np.sin(angles)},
    )
    for row, position in enumerate(positions[0]):
        for head in range(heads):
            vector = x[0, row, head * dim : (head + 1) * dim].astype(np.float64)
            expected = vector.copy()
            for pair in range(half):
                a, b, t = vector[pair], vector[pair + half], float(angles[position, pair])
                expected[pair] = a * np.cos(t) - b * np.sin(t)
                expected[pair + half] = a * np.sin(t) + b * np.cos(t)
            np.testing.assert_allclose(
                found[0, row, head * dim : (head + 1) * dim], expected, rtol=0, atol=1e-5
            )


def test_fused_operators_run_their_references_with_defaults_and_absent_inputs() -> None:
    x, residual = noise(4, 32, dtype="bf16"), noise(4, 32, dtype="bf16", seed=1)
    w = noise(32, seed=2)
    fused = helper.make_node(
        "rms_norm",
        ["x", "r", "w", "", ""],
        ["y", "t"],
        name="n",
        domain=TRTC_DOMAIN,
        eps=1e-5,
        out_dtype="bf16",
    )
    found = run_node(fused, {"x": x, "r": residual}, {"w": w})
    total = cast(x.astype(np.float32) + residual.astype(np.float32), "bf16").astype(np.float32)
    rms = np.sqrt((total * total).mean(-1, keepdims=True) + 1e-5)
    assert found.dtype == BF16
    np.testing.assert_allclose(found.astype(np.float32), total / rms * w, rtol=2**-7, atol=1e-6)


def test_a_misspelt_attribute_is_a_bug_that_is_found() -> None:
    wrong = helper.make_node("gather_rows", ["x", "r"], ["y"], name="n", domain=TRTC_DOMAIN, rows=3)
    with pytest.raises(AssertionError, match="rows"):
        run_node(wrong, {"x": noise(4, 8), "r": np.asarray([1], dtype=np.int32)}, {})


def test_a_missing_attribute_is_a_bug_that_is_found() -> None:
    wrong = helper.make_node("rms_norm", ["x", "", "w"], ["y"], name="n", domain=TRTC_DOMAIN)
    with pytest.raises(AssertionError, match="eps"):
        run_node(wrong, {"x": noise(4, 8)}, {"w": noise(8)})


# --- steps ---------------------------------------------------------------------------------------


def step_inputs(module: Module, scramble: int | None = None) -> dict[str, Array]:
    pages = Pages(module.kv.page_size, 16, scramble)
    inputs: dict[str, Array] = dict(pages.step({"a": random_prompt(11), "b": random_prompt(3)}))
    return inputs | new_pools(module.kv, 16)


def test_pools_given_are_left_as_they_were(tmp_path: Path) -> None:
    module, reader = source_module(tiny_checkpoint("llama", tmp_path))
    inputs = step_inputs(module)
    outputs = Evaluator(module, reader).run(inputs)
    assert list(outputs) == ["logits", "kv_0_out", "kv_1_out"]
    assert not inputs["kv_0"].any() and outputs["kv_0_out"].any()


def test_only_the_rows_asked_for_get_logits(tmp_path: Path) -> None:
    module, reader = source_module(tiny_checkpoint("llama", tmp_path))
    evaluator = Evaluator(module, reader)
    inputs = step_inputs(module)
    every = evaluator.run(inputs)["logits"]
    some = evaluator.run({**inputs, "logit_rows": np.asarray([13, 2, 2], dtype=np.int32)})["logits"]
    np.testing.assert_array_equal(some, every[[13, 2, 2]])


def test_where_the_pages_lie_does_not_matter(tmp_path: Path) -> None:
    module, reader = source_module(tiny_checkpoint("qwen3", tmp_path), "bf16")
    evaluator = Evaluator(module, reader)
    straight = evaluator.run(step_inputs(module))["logits"]
    scrambled = evaluator.run(step_inputs(module, scramble=5))["logits"]
    np.testing.assert_array_equal(straight, scrambled)


def test_weights_are_dequantised_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, reader = source_module(tiny_checkpoint("llama", tmp_path))
    evaluator = Evaluator(module, reader)

    def read(name: str) -> Array:
        raise AssertionError(f"{name} was read in a step")

    monkeypatch.setattr(reader, "read", read)
    assert evaluator.run(step_inputs(module))["logits"].shape == (14, 160)
