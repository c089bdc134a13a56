"""The source graph: its shape, its conventions, and its quantised linears against Transformers."""

import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from tests.support.evaluate import LIMITS, PAGE_SIZE, source_module
from tests.support.models import (
    FAMILIES,
    architecture_of,
    random_prompt,
    tiny_checkpoint,
    tiny_config,
    transformers_logits,
    transformers_model,
)
from tests.support.steps import Stepper
from trtc.builder.checkpoint.checkpoint import open_checkpoint
from trtc.builder.checkpoint.dummy import dummy_checkpoint
from trtc.builder.evaluator import Evaluator
from trtc.builder.families.registry import decoder_spec
from trtc.builder.graph import GraphRequest, build_graph
from trtc.builder.graph_writer import INLINE_ELEMENTS
from trtc.builder.module import OPSET, TRTC_DOMAIN, Module
from trtc.builder.onnx_check import check_module, is_external, with_weights_as_inputs
from trtc.builder.recipes import Array, TensorReader
from trtc.builder.spec import DecoderSpec
from trtc.plugins.registry import REGISTRY
from trtc.plugins.rounding import cast
from trtc.protos.errors import CheckpointError, UnsupportedError
from trtc.quant.scheme import (
    SCHEMES,
    CheckpointQuantization,
    QuantizedLinear,
    Scheme,
    TensorSource,
    WeightFormat,
)

WIDE = {"hidden_size": 128, "intermediate_size": 256}
"""Sizes that groups of 128 divide."""
SCHEME_NAMES = ("fp32", "bf16", "fp8", "int8_sq", "int4_awq", "w4a8_awq")


def spec_of(family: str, **fields: Any) -> DecoderSpec:
    config = json.loads(tiny_config(family, **fields).to_json_string(use_diff=False))
    config["architectures"] = [architecture_of(family)]
    return decoder_spec(config, LIMITS.max_seq_len)


def dummy_module(family: str, scheme: str, **fields: Any) -> tuple[Module, TensorReader]:
    reader, quantization = dummy_checkpoint(spec_of(family, **fields), SCHEMES[scheme])
    kv_dtype = "f8e4m3" if scheme == "fp8" else SCHEMES[scheme].dtype
    request = GraphRequest(SCHEMES[scheme], kv_dtype, LIMITS, quantization, PAGE_SIZE)
    return build_graph(spec_of(family, **fields), request, reader), reader


# --- structure ---------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEME_NAMES)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "phi3"])
def test_the_checker_passes(family: str, scheme: str) -> None:
    check_module(dummy_module(family, scheme, **WIDE)[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_declared_types_and_shapes_agree_with_inference(family: str) -> None:
    """onnx infers what follows every standard operator; a false declaration is an error."""
    model = with_weights_as_inputs(dummy_module(family, "bf16")[0].model)
    onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)


@pytest.mark.parametrize("scheme", ["fp32", "fp8", "int4_awq"])
def test_every_value_and_weight_is_described(scheme: str) -> None:
    module, reader = dummy_module("llama", scheme, **WIDE)
    graph = module.model.graph
    names = [node.name for node in graph.node]
    assert all(names) and len(set(names)) == len(names)
    described = {info.name for info in (*graph.value_info, *graph.output)}
    assert described == {name for node in graph.node for name in node.output}
    assert {item.name for item in graph.initializer} == set(module.recipes)
    for item in graph.initializer:
        values = module.recipes[item.name].load(reader)
        assert list(values.shape) == list(item.dims), item.name
        assert onnx.helper.np_dtype_to_tensor_dtype(values.dtype) == item.data_type, item.name
        if values.size <= INLINE_ELEMENTS:
            np.testing.assert_array_equal(onnx.numpy_helper.to_array(item), values)
        else:
            assert is_external(item) and not item.raw_data
            assert [(e.key, e.value) for e in item.external_data] == [("location", item.name)]


def test_inputs_and_outputs_are_the_step_abi() -> None:
    module, _ = dummy_module("llama", "fp8", **WIDE)
    graph = module.model.graph

    def described(info: onnx.ValueInfoProto) -> tuple[str, int, list[Any]]:
        tensor = info.type.tensor_type
        sizes = [d.dim_param or d.dim_value for d in tensor.shape.dim]
        return info.name, tensor.elem_type, sizes

    int32, fp8 = onnx.TensorProto.INT32, onnx.TensorProto.FLOAT8E4M3FN
    pool = ["num_pages", 2, PAGE_SIZE, 2, 32]
    assert [described(info) for info in graph.input] == [
        ("token_ids", int32, ["T"]),
        ("positions", int32, ["T"]),
        ("slots", int32, ["T"]),
        ("query_start", int32, ["B+1"]),
        ("context_lens", int32, ["B"]),
        ("page_table", int32, ["B", "P"]),
        ("logit_rows", int32, ["R"]),
        ("kv_0", fp8, pool),
        ("kv_1", fp8, pool),
    ]
    assert [described(info) for info in graph.output] == [
        ("logits", onnx.TensorProto.FLOAT, ["R", 160]),
        ("kv_0_out", fp8, pool),
        ("kv_1_out", fp8, pool),
    ]
    assert {(o.domain, o.version) for o in module.model.opset_import} == {
        ("", OPSET),
        (TRTC_DOMAIN, 1),
    }
    assert [one.entry.element for one in module.kv.places] == ["f8e4m3"] * 2


def test_trtc_nodes_carry_what_their_operators_declare() -> None:
    for family in ("llama", "gemma2", "qwen3_moe"):
        for node in dummy_module(family, "bf16")[0].model.graph.node:
            if node.domain != TRTC_DOMAIN:
                continue
            op = REGISTRY[node.op_type]
            given = {attribute.name for attribute in node.attribute}
            assert given <= {a.name for a in op.attributes}
            assert given >= {a.name for a in op.attributes if a.default is None}
            assert len(node.input) <= len(op.inputs)
            required = [index for index, p in enumerate(op.inputs) if not p.optional]
            assert all(node.input[index] for index in required)


def sites(module: Module, prefix: str) -> list[tuple[str, str]]:
    return [
        (node.name.removeprefix(prefix), node.op_type)
        for node in module.model.graph.node
        if node.name.startswith(prefix)
    ]


def test_a_plain_linear() -> None:
    module, _ = dummy_module("qwen2", "bf16")
    assert sites(module, "layers.1.attention.q.") == [
        ("transpose", "Transpose"),
        ("matmul", "MatMul"),
        ("bias", "Add"),
    ]


def test_an_fp8_linear() -> None:
    assert sites(dummy_module("llama", "fp8", **WIDE)[0], "layers.1.mlp.down.") == [
        ("input_q", "QuantizeLinear"),
        ("input_dq", "DequantizeLinear"),
        ("weight_dq", "DequantizeLinear"),
        ("transpose", "Transpose"),
        ("matmul", "MatMul"),
    ]


def test_a_w4a8_linear() -> None:
    assert sites(dummy_module("llama", "w4a8_awq", **WIDE)[0], "layers.1.mlp.down.") == [
        ("pre_scale", "Mul"),
        ("input_q", "QuantizeLinear"),
        ("input_dq", "DequantizeLinear"),
        ("weight_dq", "DequantizeLinear"),
        ("weight_f8_q", "QuantizeLinear"),
        ("weight_f8_dq", "DequantizeLinear"),
        ("transpose", "Transpose"),
        ("matmul", "MatMul"),
    ]


def test_the_lm_head_and_routers_are_never_quantised() -> None:
    module, _ = dummy_module("qwen3_moe", "fp8", hidden_size=128)
    assert [op for _, op in sites(module, "lm_head.")] == ["Transpose", "MatMul", "Cast"]
    assert [op for _, op in sites(module, "layers.0.mlp.router.")] == [
        "Cast",
        "Transpose",
        "MatMul",
    ]


def test_tied_embeddings_are_one_weight() -> None:
    tied = {item.name for item in dummy_module("qwen3", "bf16")[0].model.graph.initializer}
    untied = {item.name for item in dummy_module("llama", "bf16")[0].model.graph.initializer}
    assert "lm_head.weight" not in tied and "lm_head.weight" in untied


def test_layers_share_one_rope_table() -> None:
    graph = dummy_module("gemma2", "fp32")[0].model.graph
    assert [i.name for i in graph.initializer if "rope" in i.name] == ["rope.0.cos", "rope.0.sin"]


def test_building_twice_gives_the_same_bytes() -> None:
    first, again = (dummy_module("qwen3_moe", "fp8")[0].model for _ in range(2))
    assert first.SerializeToString(deterministic=True) == again.SerializeToString(
        deterministic=True
    )


class CountingReader:
    """Counts what is read of another reader."""

    def __init__(self, inner: TensorReader) -> None:
        self._inner = inner
        self.num_bytes = 0

    def read(self, name: str) -> Array:
        values = self._inner.read(name)
        self.num_bytes += values.nbytes
        return values


@pytest.mark.parametrize("scheme", ["bf16", "fp8", "int8_sq", "int4_awq"])
def test_a_70b_graph_takes_seconds_and_reads_no_weights(scheme: str) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128256,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
    }
    started = time.monotonic()
    spec = decoder_spec(config, 8192)
    dummy, quantization = dummy_checkpoint(spec, SCHEMES[scheme])
    reader = CountingReader(dummy)
    module = build_graph(spec, GraphRequest(SCHEMES[scheme], "bf16", LIMITS, quantization), reader)
    check_module(module)
    assert time.monotonic() - started < 20
    assert reader.num_bytes < 64 << 20
    assert module.model.ByteSize() < 8 << 20


# --- quantised linears -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """A way to quantise, in the terms of quant/scheme.py."""

    weight: WeightFormat
    group_size: int | None = None
    per_tensor: bool = False
    zero_point: bool = False
    input_scale: bool = False
    pre_scale: bool = False


CASES: Mapping[str, Case] = {
    "fp8": Case("f8e4m3", per_tensor=True, input_scale=True),
    "fp8 weights by channel": Case("f8e4m3"),
    "int8 smoothquant": Case("i8", input_scale=True, pre_scale=True),
    "int8 weights": Case("i8"),
    "int4": Case("i4", group_size=32, pre_scale=True),
    "int4 with zero points": Case("i4", group_size=32, zero_point=True),
    "int4 by channel": Case("i4"),
    "w4a8": Case("i4_f8", group_size=32, input_scale=True, pre_scale=True),
    "w4a8 weights": Case("i4_f8", group_size=32),
}
MAX_CODE = {"f8e4m3": 448.0, "i8": 127.0, "i4": 7.0, "i4_f8": 7.0}


class MemoryReader:
    """Tensors made by the test, over a checkpoint's own."""

    def __init__(self, inner: TensorReader, tensors: Mapping[str, Array]) -> None:
        self._inner, self._tensors = inner, tensors

    def read(self, name: str) -> Array:
        return self._tensors[name] if name in self._tensors else self._inner.read(name)


def quantise(weight: NDArray[np.float32], case: Case, seed: int) -> dict[str, Array]:
    """Canonical tensors of one linear, by a quantiser of the test's own."""
    rng = np.random.default_rng(seed)
    n, k = weight.shape
    size = case.group_size or k
    blocks = weight.reshape(n, k // size, size)
    tensors: dict[str, Array] = {}
    if case.zero_point:
        low, high = blocks.min(-1), blocks.max(-1)
        scale = ((high - low) / 15).astype(np.float32)
        zero = np.clip(np.rint(-low / scale), 0, 15)
        codes = np.clip(np.rint(blocks / scale[..., None]) + zero[..., None], 0, 15)
        tensors["weight_zero"] = zero.astype(ml_dtypes.uint4)
        tensors["weight"] = codes.reshape(n, k).astype(ml_dtypes.uint4)
    else:
        peak = abs(blocks).max(-1)
        peak = peak.max(keepdims=True) if case.per_tensor else peak
        scale = np.asarray(peak / MAX_CODE[case.weight], dtype=np.float32)
        codes = (blocks / scale[..., None]).reshape(n, k)
        tensors["weight"] = (
            cast(codes, "f8e4m3")
            if case.weight == "f8e4m3"
            else np.rint(codes).astype(ml_dtypes.int4 if "i4" in case.weight else np.int8)
        )
    tensors["weight_scale"] = scale
    if case.weight == "i4_f8":
        tensors["weight_scale_2"] = np.asarray(abs(weight).max() / 448, dtype=np.float32)
    if case.input_scale:
        limit = 127 if case.weight == "i8" else 448
        tensors["input_scale"] = np.asarray(rng.uniform(3, 5) / limit, dtype=np.float32)
    if case.pre_scale:
        tensors["pre_quant_scale"] = np.asarray(rng.uniform(0.5, 1.5, k), dtype=np.float32)
    return tensors


def dequantise(tensors: Mapping[str, Array], case: Case) -> NDArray[np.float32]:
    codes = tensors["weight"].astype(np.float32)
    n, k = codes.shape
    scale = np.broadcast_to(tensors["weight_scale"], (n, tensors["weight_scale"].shape[1])).repeat(
        k // tensors["weight_scale"].shape[1], axis=1
    )
    zero = tensors.get("weight_zero")
    if zero is not None:
        codes = codes - zero.astype(np.float32).repeat(k // zero.shape[1], axis=1)
    values: NDArray[np.float32] = codes * scale
    if case.weight == "i4_f8":
        second = tensors["weight_scale_2"]
        values = cast(values / second, "f8e4m3").astype(np.float32) * second
    return values


def quantised_input(tensors: Mapping[str, Array], case: Case) -> Callable[..., Any]:
    """What the graph does to a linear's input, in torch."""

    def hook(_module: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        x = inputs[0]
        if "pre_quant_scale" in tensors:
            x = x * torch.from_numpy(tensors["pre_quant_scale"])
        if "input_scale" in tensors:
            scale = torch.from_numpy(tensors["input_scale"])
            if case.weight == "i8":
                x = torch.clamp(torch.round(x / scale), -128, 127) * scale
            else:
                x = torch.clamp(x / scale, -448, 448).to(torch.float8_e4m3fn).float() * scale
        return (x,)

    return hook


def quantised_linears(
    path: Path, case: Case
) -> tuple[CheckpointQuantization, dict[str, dict[str, Array]]]:
    checkpoint = open_checkpoint(str(path))
    reader = checkpoint.open_weights()
    spec = decoder_spec(checkpoint.config, LIMITS.max_seq_len)
    prefixes = list(dict.fromkeys(linear.name for linear in spec.linears))
    made = {
        prefix: quantise(np.asarray(reader.read(f"{prefix}.weight"), dtype=np.float32), case, seed)
        for seed, prefix in enumerate(prefixes)
    }
    linears = {
        prefix: QuantizedLinear(
            case.weight,
            {key: TensorSource((f"{prefix}.{key}",)) for key in tensors},
            case.group_size,
            case.zero_point,
        )
        for prefix, tensors in made.items()
    }
    scheme = Scheme("case", "f32", case.weight, "f32", case.group_size)
    return CheckpointQuantization("test", scheme, linears, {}), made


def evaluate_quantised(
    path: Path,
    quantization: CheckpointQuantization,
    made: Mapping[str, Mapping[str, Array]],
    prompt: list[int],
) -> NDArray[np.float32]:
    checkpoint = open_checkpoint(str(path))
    tensors = {f"{prefix}.{key}": v for prefix, one in made.items() for key, v in one.items()}
    reader = MemoryReader(checkpoint.open_weights(), tensors)
    spec = decoder_spec(checkpoint.config, LIMITS.max_seq_len)
    request = GraphRequest(quantization.scheme, "f32", LIMITS, quantization, PAGE_SIZE)
    module = build_graph(spec, request, reader)
    check_module(module)
    return Stepper(Evaluator(module, reader).run, module.kv).prefill(prompt, 9)


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3"])
@pytest.mark.parametrize("name", CASES)
def test_quantised_linears_multiply_as_transformers_does_with_the_same_rounding(
    name: str, family: str, tmp_path: Path
) -> None:
    case, prompt = CASES[name], random_prompt(20)
    path = tiny_checkpoint(family, tmp_path)
    quantization, made = quantised_linears(path, case)
    model = transformers_model(path)
    for prefix, tensors in made.items():
        linear = model.get_submodule(prefix)
        linear.weight.data = torch.from_numpy(dequantise(tensors, case))
        linear.register_forward_pre_hook(quantised_input(tensors, case))
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0].numpy()
    found = evaluate_quantised(path, quantization, made, prompt)
    if case.input_scale:
        # A sum in another order may round an activation the other way, a step of 1/8 in FP8.
        assert np.median(abs(found - expected)) < 1e-3 * expected.std()
        assert np.mean(abs(found - expected)) < 2e-2 * expected.std()
    else:
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize(
    "name",
    [
        "fp8 weights by channel",
        "int8 weights",
        "int4 with zero points",
        "int4 by channel",
        "w4a8 weights",
    ],
)
def test_quantised_experts_multiply_as_transformers_does_with_their_values(
    name: str, family: str, tmp_path: Path
) -> None:
    case, prompt = CASES[name], random_prompt(20)
    path = tiny_checkpoint(family, tmp_path)
    quantization, made = quantised_linears(path, case)
    found = evaluate_quantised(path, quantization, made, prompt)
    reader = open_checkpoint(str(path)).open_weights()
    values = {name: torch.from_numpy(np.array(reader.read(name))) for name in reader.names}
    for prefix, tensors in made.items():
        values[f"{prefix}.weight"] = torch.from_numpy(dequantise(tensors, case))
    save_file(values, path / "model.safetensors", metadata={"format": "pt"})
    with torch.no_grad():
        expected = transformers_model(path)(torch.tensor([prompt])).logits[0].numpy()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


def test_experts_quantise_their_inputs_by_the_larger_scale(tmp_path: Path) -> None:
    path = tiny_checkpoint("mixtral", tmp_path)
    quantization, made = quantised_linears(path, CASES["fp8"])
    module, reader = quantised_module(path, quantization, made)
    name = "layers.0.mlp.experts.gate_up_input_scale"
    prefix = "model.layers.0.block_sparse_moe.experts"
    expected = [
        max(float(made[f"{prefix}.{e}.{one}"]["input_scale"]) for one in ("w1", "w3"))
        for e in range(4)
    ]
    np.testing.assert_allclose(module.recipes[name].load(reader), expected)


def quantised_module(
    path: Path, quantization: CheckpointQuantization, made: Mapping[str, Mapping[str, Array]]
) -> tuple[Module, TensorReader]:
    checkpoint = open_checkpoint(str(path))
    tensors = {f"{prefix}.{key}": v for prefix, one in made.items() for key, v in one.items()}
    reader = MemoryReader(checkpoint.open_weights(), tensors)
    spec = decoder_spec(checkpoint.config, LIMITS.max_seq_len)
    request = GraphRequest(quantization.scheme, "f32", LIMITS, quantization, PAGE_SIZE)
    return build_graph(spec, request, reader), reader


# --- KV scales ---------------------------------------------------------------------------------


def kv_logits(path: Path, scales: Mapping[str, float]) -> NDArray[np.float32]:
    checkpoint = open_checkpoint(str(path))
    tensors = {name: np.asarray(value, dtype=np.float32) for name, value in scales.items()}
    reader = MemoryReader(checkpoint.open_weights(), tensors)
    spec = decoder_spec(checkpoint.config, LIMITS.max_seq_len)
    sources = {name: TensorSource((name,)) for name in scales}
    quantization = CheckpointQuantization("test", SCHEMES["fp32"], {}, sources)
    request = GraphRequest(SCHEMES["fp32"], "f8e4m3", LIMITS, quantization, PAGE_SIZE)
    module = build_graph(spec, request, reader)
    check_module(module)
    return Stepper(Evaluator(module, reader).run, module.kv).prefill(random_prompt(20), 9)


def test_fp8_pools_use_the_scales_of_the_checkpoint(tmp_path: Path) -> None:
    path = tiny_checkpoint("llama", tmp_path)
    exact = transformers_model(path)(torch.tensor([random_prompt(20)])).logits[0].detach().numpy()
    keys = [f"{which}:{layer}" for which in "kv" for layer in range(2)]

    def error(scale: float) -> float:
        return float(abs(kv_logits(path, dict.fromkeys(keys, scale)) - exact).mean())

    without = float(abs(kv_logits(path, {}) - exact).mean())
    assert 0 < without < 0.2
    assert error(1.0) == without
    assert error(0.02) < 0.2  # fits: 448 * 0.02 is above every key and value
    assert error(1e-4) > 3 * without  # clips nearly everything
    assert error(1e4) > 3 * without  # flushes nearly everything to zero


# --- refusals ----------------------------------------------------------------------------------


def test_groups_that_do_not_divide_are_refused_by_the_linear(tmp_path: Path) -> None:
    path = tiny_checkpoint("llama", tmp_path)
    quantization, made = quantised_linears(path, CASES["int4"])
    odd = dataclasses.replace(quantization.linears["model.layers.1.mlp.up_proj"], group_size=48)
    linears = {**quantization.linears, "model.layers.1.mlp.up_proj": odd}
    with pytest.raises(UnsupportedError, match=r"layers\.1\.mlp\.up_proj: groups of 48"):
        quantised_module(path, dataclasses.replace(quantization, linears=linears), made)


def test_a_quantised_lm_head_is_refused(tmp_path: Path) -> None:
    path = tiny_checkpoint("llama", tmp_path)
    quantization, made = quantised_linears(path, CASES["int8 weights"])
    first = next(iter(quantization.linears.values()))
    linears = {**quantization.linears, "lm_head": first}
    with pytest.raises(UnsupportedError, match="lm_head"):
        quantised_module(path, dataclasses.replace(quantization, linears=linears), made)


def test_scales_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = tiny_checkpoint("llama", tmp_path)
    quantization, made = quantised_linears(path, CASES["int8 weights"])
    made["model.layers.0.self_attn.q_proj"]["weight_scale"] = np.ones((7, 1), dtype=np.float32)
    with pytest.raises(CheckpointError, match="7 scales for 64"):
        quantised_module(path, quantization, made)


def test_experts_with_fp4_weights_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="routed experts"):
        dummy_module("mixtral", "nvfp4", hidden_size=128, intermediate_size=128)


def test_experts_quantised_in_different_ways_are_refused(tmp_path: Path) -> None:
    path = tiny_checkpoint("mixtral", tmp_path)
    quantization, made = quantised_linears(path, CASES["int8 weights"])
    name = "model.layers.0.block_sparse_moe.experts.2.w1"
    linears = {key: value for key, value in quantization.linears.items() if key != name}
    with pytest.raises(CheckpointError, match="in different ways"):
        quantised_module(path, dataclasses.replace(quantization, linears=linears), made)


def test_gate_and_up_that_read_their_input_in_two_orders_are_refused(tmp_path: Path) -> None:
    path = tiny_checkpoint("mixtral", tmp_path)
    quantization, made = quantised_linears(path, CASES["int8 weights"])
    name = "model.layers.0.block_sparse_moe.experts.2.w1"
    made[name]["column_order"] = np.arange(64, dtype=np.int32)[::-1]
    source = TensorSource((f"{name}.column_order",))
    linear = quantization.linears[name]
    linear = dataclasses.replace(linear, tensors={**linear.tensors, "column_order": source})
    linears = {**quantization.linears, name: linear}
    with pytest.raises(UnsupportedError, match=r"experts\.2\.w3.*act-order"):
        quantised_module(path, dataclasses.replace(quantization, linears=linears), made)


@pytest.mark.parametrize("family", ["llama3", "gemma2", "qwen3", "mixtral", "qwen3_moe"])
def test_bf16_is_as_near_to_exact_as_transformers_bf16(family: str, tmp_path: Path) -> None:
    path = tiny_checkpoint(family, tmp_path, "bfloat16")
    module, reader = source_module(path, "bf16")
    prompt = random_prompt(30)
    exact = transformers_logits(path, prompt)
    ours = Stepper(Evaluator(module, reader).run, module.kv).prefill(prompt, 8)
    theirs = transformers_logits(path, prompt, "bfloat16")
    # The median: a near tie between experts, decided the other way, moves whole rows.
    assert np.median(abs(ours - exact)) < 1.5 * np.median(abs(theirs - exact))
