"""Imported formats against weights written out independently, and what each refuses by name."""

import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from compressed_tensors.compressors.mxfp8 import MXFP8QuantizationCompressor
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from modelopt.torch.quantization.qtensor import MXFP8QTensor

from tests.support.quantized import (
    awq_linear,
    canonical,
    dequantized,
    fp8_block_linear,
    fp8_linear,
    gptq_linear,
    headers,
    mxfp4_linear,
    nvfp4_linear,
    packed_linear,
)
from trtc.protos.errors import CheckpointError, UnsupportedError
from trtc.quant.formats.fp4 import with_fp4_activations, without_fp4
from trtc.quant.prequantized import read_quantization

Q = "model.layers.0.self_attn.q_proj"
O_PROJ = "model.layers.0.self_attn.o_proj"
UP = "model.layers.0.mlp.up_proj"
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": True, "desc_act": False}
FP8_BLOCK = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


def packed(**weights: Any) -> dict[str, Any]:
    """A compressed-tensors config."""
    settings = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
    group = {"targets": ["Linear"], "weights": {**settings, **weights}, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def scattered(columns: int, group: int) -> Any:
    """The group of each column, in no order."""
    return np.random.default_rng(1).permutation(columns) // group


def read(declared: dict[str, Any], tensors: dict[str, Any]) -> Any:
    tensors = {**tensors, "lm_head.weight": np.zeros((4, 32), ml_dtypes.bfloat16)}
    return read_quantization({"quantization_config": declared}, None, headers(tensors))


def check(declared: dict[str, Any], tensors: dict[str, Any], prefix: str, exact: Any) -> Any:
    found = read(declared, tensors)
    assert list(found.linears) == [prefix]
    np.testing.assert_allclose(dequantized(found, prefix, tensors), exact, rtol=1e-6)
    return found


@pytest.mark.parametrize("group", [16, 32])
def test_awq(group: int) -> None:
    tensors, exact = awq_linear(Q, rows=24, columns=64, group=group)
    found = check({**AWQ, "group_size": group}, tensors, Q, exact)
    assert found.source == "awq"
    assert found.scheme.group_size == group
    linear = found.linears[Q]
    assert (linear.weight, linear.has_zero_point, linear.group_size) == ("i4", True, group)
    assert canonical(linear, tensors)["weight"].dtype == ml_dtypes.uint4


def test_awq_with_one_group() -> None:
    tensors, exact = awq_linear(Q, rows=8, columns=64, group=64)
    found = check({**AWQ, "group_size": -1}, tensors, Q, exact)
    assert found.linears[Q].group_size is None


@pytest.mark.parametrize("v2", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
def test_gptq(symmetric: bool, v2: bool) -> None:
    tensors, exact = gptq_linear(Q, rows=24, columns=64, group=16, symmetric=symmetric, v2=v2)
    declared = {**GPTQ, "sym": symmetric, "checkpoint_format": "gptq_v2" if v2 else "gptq"}
    found = check(declared, tensors, Q, exact)
    assert found.linears[Q].has_zero_point is not symmetric
    assert found.scheme.name == "int4_gptq"


def test_gptq_of_8_bits_is_an_int8_weight() -> None:
    tensors, exact = gptq_linear(Q, rows=8, columns=32, group=16, bits=8)
    found = check({**GPTQ, "bits": 8}, tensors, Q, exact)
    assert found.linears[Q].weight == "i8"
    assert canonical(found.linears[Q], tensors)["weight"].dtype == np.int8


@pytest.mark.parametrize("bits", [4, 8])
def test_gptq_with_scattered_groups(bits: int) -> None:
    tensors, exact = gptq_linear(Q, 8, 64, 16, bits=bits, g_idx=scattered(64, 16))
    found = check({**GPTQ, "bits": bits, "desc_act": True}, tensors, Q, exact)
    order = canonical(found.linears[Q], tensors)["column_order"]
    assert sorted(order) == list(range(64)) and list(order) != sorted(order)


def test_packed_linear_with_scattered_groups() -> None:
    tensors, exact = packed_linear(UP, 8, 64, 16, symmetric=False, g_idx=scattered(64, 16))
    check(packed(group_size=16, symmetric=False, actorder="group"), tensors, UP, exact)


MXFP4 = packed(type="float", group_size=32) | {"format": "mxfp4-pack-quantized"}
MXFP4_EXPERT = "model.layers.0.mlp.experts.3.up_proj"


def test_mxfp4_linears_and_experts_are_kept_as_they_are() -> None:
    q, exact_q = mxfp4_linear(Q, 24, 64)
    up, exact_up = mxfp4_linear(MXFP4_EXPERT, 24, 64, seed=1)
    tensors = {**q, **up}
    found = read(MXFP4, tensors)
    for prefix, exact in ((Q, exact_q), (MXFP4_EXPERT, exact_up)):
        assert (found.linears[prefix].weight, found.linears[prefix].group_size) == ("mxfp4", 32)
        np.testing.assert_array_equal(dequantized(found, prefix, tensors), exact)
    assert found.scheme.name == "mixed" and without_fp4(found) is found and not found.notes
    assert read(MXFP4, q).scheme.name == "mxfp4_weights"
    assert read(MXFP4, up).scheme.name == "mxfp4"


def test_mxfp4_linears_are_int8_where_e2m1_is_multiplied_by_e2m1() -> None:
    q, exact_q = mxfp4_linear(Q, 24, 64)
    up, _ = mxfp4_linear(MXFP4_EXPERT, 24, 64, seed=1)
    tensors = {**q, **up}
    found = with_fp4_activations(read(MXFP4, tensors))
    np.testing.assert_array_equal(dequantized(found, Q, tensors), exact_q)
    formats = [
        (found.linears[one].weight, found.linears[one].group_size) for one in (Q, MXFP4_EXPERT)
    ]
    assert formats == [("i8", 32), ("mxfp4", 32)]
    assert found.scheme.name == "mixed" and "stored as int8" in found.notes[0]
    alone = with_fp4_activations(read(MXFP4, q))
    assert (alone.scheme.name, alone.scheme.group_size) == ("int8_weights", 32)


@pytest.mark.parametrize("prefix", [Q, MXFP4_EXPERT])
def test_mxfp4_scales_that_are_none(prefix: str) -> None:
    tensors, _ = mxfp4_linear(prefix, 24, 64)
    name = f"{prefix}.weight_scale"
    tensors[name].view(np.uint8)[3, 1] = 255
    with pytest.raises(CheckpointError, match=r"weight_scale: a scale is NaN"):
        canonical(read(MXFP4, tensors).linears[prefix], tensors)
    for wrong in ({}, {name: tensors[name][:, :1]}, {name: tensors[name].astype(np.float32)}):
        kept = {key: one for key, one in tensors.items() if key != name}
        with pytest.raises(CheckpointError, match=name):
            read(MXFP4, {**kept, **wrong})


NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
NVFP4_PACKED = packed(**NVFP4) | {"format": "nvfp4-pack-quantized"}
NVFP4_MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}


def nvfp4_with_inputs() -> dict[str, Any]:
    declared: dict[str, Any] = json.loads(json.dumps(NVFP4_PACKED))
    declared["config_groups"]["group_0"]["input_activations"] = {**NVFP4, "dynamic": "local"}
    return declared


@pytest.mark.parametrize("modelopt", [False, True])
def test_nvfp4_keeps_its_weights_where_there_is_no_fp4_arithmetic(modelopt: bool) -> None:
    tensors, exact = nvfp4_linear(Q, 24, 64, modelopt=modelopt)
    found = read(NVFP4_MODELOPT if modelopt else nvfp4_with_inputs(), tensors)
    assert (found.scheme.name, found.scheme.group_size) == ("nvfp4", 16)
    np.testing.assert_allclose(dequantized(found, Q, tensors), exact, rtol=1e-6)
    assert float(canonical(found.linears[Q], tensors)["input_scale"]) == pytest.approx(0.01)
    assert with_fp4_activations(found) is found
    narrow = without_fp4(found)
    np.testing.assert_allclose(dequantized(narrow, Q, tensors), exact, rtol=1e-6)
    assert (narrow.scheme.name, narrow.scheme.group_size) == ("nvfp4_weights", 16)
    assert narrow.scheme.activation == "bf16"
    assert set(narrow.linears[Q].tensors) == {"weight", "weight_scale", "weight_scale_2"}
    assert "no FP4 arithmetic" in narrow.notes[0]


def test_nvfp4_experts_keep_their_weights_where_there_is_no_fp4_arithmetic() -> None:
    q, exact_q = nvfp4_linear(Q, 24, 64)
    up, exact_up = nvfp4_linear(MXFP4_EXPERT, 24, 64, seed=1)
    tensors = {**q, **up}
    found = without_fp4(read(nvfp4_with_inputs(), tensors))
    np.testing.assert_allclose(dequantized(found, Q, tensors), exact_q, rtol=1e-6)
    np.testing.assert_allclose(dequantized(found, MXFP4_EXPERT, tensors), exact_up, rtol=1e-6)
    for linear in found.linears.values():
        assert set(linear.tensors) == {"weight", "weight_scale", "weight_scale_2"}
    assert (found.scheme.name, found.scheme.activation) == ("nvfp4_weights", "bf16")
    (note,) = found.notes
    assert "no FP4 arithmetic" in note


def test_nvfp4_without_activations_is_int8_where_e2m1_is_multiplied_by_e2m1() -> None:
    tensors, exact = nvfp4_linear(Q, 24, 64)
    found = read(NVFP4_PACKED, tensors)
    np.testing.assert_allclose(dequantized(found, Q, tensors), exact, rtol=1e-6)
    assert found.scheme.name == "nvfp4_weights" and without_fp4(found) is found
    wide = with_fp4_activations(found)
    np.testing.assert_allclose(dequantized(wide, Q, tensors), exact, rtol=1e-6)
    assert (wide.scheme.name, wide.scheme.group_size) == ("int8_weights", 16)
    assert "stored as int8" in wide.notes[0]


@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf])
def test_nvfp4_global_scales_that_are_none(value: float) -> None:
    tensors, _ = nvfp4_linear(Q, 24, 64)
    name = f"{Q}.weight_global_scale"
    tensors[name][0] = value
    with pytest.raises(CheckpointError, match=rf"{name}: is .*not a positive number"):
        canonical(read(NVFP4_PACKED, tensors).linears[Q], tensors)
    for missing in (name, f"{Q}.weight_scale", f"{Q}.input_global_scale"):
        kept = {key: one for key, one in tensors.items() if key != missing}
        with pytest.raises(CheckpointError, match=missing):
            read(nvfp4_with_inputs(), kept)


def test_gptq_whose_index_contradicts_desc_act() -> None:
    tensors, _ = gptq_linear(Q, rows=8, columns=32, group=16, g_idx=scattered(32, 16))
    found = read(GPTQ, tensors)
    with pytest.raises(CheckpointError, match=r"q_proj\.g_idx.*desc_act"):
        canonical(found.linears[Q], tensors)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([0] * 15 + [1] * 17, "gives group 0 15 columns, and group_size is 16"),
        ([0] * 16 + [1] * 15 + [2], "names group 2, and the scales are of 2"),
        ([0] * 16 + [1] * 15 + [-1], "names group -1"),
        ([0] * 31 + [2**31 - 1], "names group 2147483647"),
    ],
)
def test_groups_of_other_sizes_are_refused(groups: list[int], message: str) -> None:
    tensors, _ = gptq_linear(Q, rows=8, columns=32, group=16)
    tensors[f"{Q}.g_idx"] = np.array(groups, np.int32)
    found = read({**GPTQ, "desc_act": True}, tensors)
    for source in (found.linears[Q].tensors[name] for name in ("weight", "column_order")):
        with pytest.raises(CheckpointError, match=rf"q_proj\.g_idx: .*{message}"):
            assert source.function is not None
            source.function(*(tensors[name] for name in source.names))


@pytest.mark.parametrize(
    ("declared", "make", "name"),
    [
        ({**GPTQ, "desc_act": True}, gptq_linear, "g_idx"),
        (packed(group_size=16, actorder="group"), packed_linear, "weight_g_idx"),
    ],
    ids=["gptq", "compressed-tensors"],
)
def test_index_of_groups_is_missing_or_of_another_size(
    declared: dict[str, Any], make: Any, name: str
) -> None:
    tensors, _ = make(Q, 8, 32, 16, g_idx=scattered(32, 16))
    index = tensors.pop(f"{Q}.{name}")
    for wrong in ({}, {f"{Q}.{name}": index[:-1]}):
        with pytest.raises(CheckpointError, match=rf"q_proj\.{name}: "):
            read(declared, {**tensors, **wrong})


def test_gptq_rules_are_of_the_first_pattern_that_begins_a_name() -> None:
    q, exact_q = gptq_linear(Q, 24, 64, 32, bits=8)
    o, exact_o = gptq_linear(O_PROJ, 24, 64, 16, g_idx=scattered(64, 16), seed=1)
    up, exact_up = gptq_linear(UP, 24, 64, 64, symmetric=False, seed=2)
    rules = {
        "q_proj": {"bits": 3},  # no name begins so
        "-:.*\\.down_proj": {},
        "+:.*\\.[qk]_p": {"bits": 8, "group_size": 32, "damp_percent": 0.1},
        ".*self_attn": {"desc_act": True},
        "+:model\\.layers\\.0\\.": {"sym": False, "group_size": -1},
    }
    tensors = {**q, **o, **up}
    found = read({**GPTQ, "dynamic": rules}, tensors)
    for prefix, exact in ((Q, exact_q), (O_PROJ, exact_o), (UP, exact_up)):
        np.testing.assert_allclose(dequantized(found, prefix, tensors), exact, rtol=1e-6)
    assert (found.scheme.name, found.scheme.weight, found.scheme.group_size) == ("mixed", "i4", 32)
    only = read({**GPTQ, "bits": 8, "dynamic": {"+:": {"bits": 4, "desc_act": True}}}, o)
    assert (only.scheme.name, only.scheme.group_size) == ("int4_gptq", 16)


def test_gptq_rules_that_contradict_the_weights() -> None:
    tensors, _ = gptq_linear(Q, 24, 64, 16)
    with pytest.raises(CheckpointError, match=f"{Q}.*excludes it"):
        read({**GPTQ, "dynamic": {"-:.*q_proj": {}}}, tensors)
    with pytest.raises(CheckpointError, match="scales: has shape"):
        read({**GPTQ, "dynamic": {".*q_proj": {"group_size": 32}}}, tensors)
    with pytest.raises(UnsupportedError, match=r"quantization_config\.dynamic\.bits: is 3"):
        read({**GPTQ, "dynamic": {".*q_proj": {"bits": 3}}}, tensors)


def test_gptq_that_calls_asymmetric_zeros_symmetric_is_contradictory() -> None:
    tensors, _ = gptq_linear(Q, rows=8, columns=32, group=16, symmetric=False)
    found = read(GPTQ, tensors)
    with pytest.raises(CheckpointError, match="zero points other than 8"):
        canonical(found.linears[Q], tensors)


def test_gptq_v2_read_as_v1_is_contradictory() -> None:
    tensors, _ = gptq_linear(Q, rows=8, columns=32, group=16, v2=True)
    found = read(GPTQ, tensors)
    with pytest.raises(CheckpointError, match="checkpoint_format"):
        canonical(found.linears[Q], tensors)


@pytest.mark.parametrize(("rows", "columns"), [(128, 256), (200, 256), (32, 96)])
def test_fine_grained_fp8(rows: int, columns: int) -> None:
    tensors, exact = fp8_block_linear(UP, rows, columns)
    found = check(FP8_BLOCK, tensors, UP, exact)
    assert found.scheme.name == "fp8_blocks" and found.linears[UP].dynamic
    assert not found.notes
    assert found.linears[UP].group_size == (128 if columns > 128 else None)


def test_fine_grained_fp8_with_half_a_block_is_refused() -> None:
    tensors, _ = fp8_block_linear(UP, 16, 192)
    with pytest.raises(UnsupportedError, match="192 input features"):
        read(FP8_BLOCK, tensors)


def test_static_fp8() -> None:
    tensors, exact = fp8_linear(UP, 8, 16, static=True)
    found = check({"quant_method": "fp8", "activation_scheme": "static"}, tensors, UP, exact)
    assert found.scheme.name == "fp8"
    assert canonical(found.linears[UP], tensors)["input_scale"] == np.float32(0.25)
    assert not found.notes


def test_dynamic_fp8_of_one_scale() -> None:
    tensors, exact = fp8_linear(UP, 8, 16, static=False)
    found = check({"quant_method": "fp8", "activation_scheme": "dynamic"}, tensors, UP, exact)
    assert found.scheme.name == "fp8_dynamic" and found.linears[UP].dynamic
    assert "input_scale" not in found.linears[UP].tensors


def test_fp8_kv_scales() -> None:
    tensors, _ = fp8_linear(UP, 8, 16, static=True)
    tensors["model.layers.0.self_attn.k_scale"] = np.array([0.5], np.float32)
    tensors["model.layers.11.self_attn.attn.v_scale"] = np.array(0.75, np.float32)
    found = read({"quant_method": "fp8", "activation_scheme": "static"}, tensors)
    assert found.kv_dtype == "f8e4m3"
    assert sorted(found.kv_scales) == ["k:0", "v:11"]
    source = found.kv_scales["k:0"]
    assert source.function is not None
    assert source.function(tensors[source.names[0]]).shape == ()


@pytest.mark.parametrize("symmetric", [False, True])
def test_pack_quantized(symmetric: bool) -> None:
    tensors, exact = packed_linear(Q, 24, 64, 16, symmetric=symmetric)
    found = check(packed(group_size=16, symmetric=symmetric), tensors, Q, exact)
    assert found.source == "compressed-tensors"
    assert found.linears[Q].has_zero_point is not symmetric


def test_pack_quantized_by_channel() -> None:
    tensors, exact = packed_linear(Q, 16, 64, None)
    found = check(packed(strategy="channel", group_size=None), tensors, Q, exact)
    assert found.linears[Q].group_size is None


def test_pack_quantized_of_8_bits() -> None:
    tensors, exact = packed_linear(Q, 16, 64, 32, bits=8)
    found = check(packed(num_bits=8, group_size=32), tensors, Q, exact)
    assert found.linears[Q].weight == "i8"


def as_arrays(weight: torch.Tensor, scale: torch.Tensor) -> dict[str, Any]:
    codes = weight.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
    return {f"{UP}.weight": codes, f"{UP}.weight_scale": scale.numpy()}


def test_mxfp8_of_compressed_tensors() -> None:
    """Activations in MXFP8 stay bf16."""
    weight = torch.from_numpy(np.random.default_rng(2).normal(0, 0.02, (24, 96))).float()
    scheme = preset_name_to_scheme("MXFP8", ["Linear"])
    largest = weight.reshape(24, 3, 32).abs().amax(-1)
    scale = 2.0 ** torch.ceil(torch.log2(largest / 448))
    stored = MXFP8QuantizationCompressor.compress({"weight": weight, "weight_scale": scale}, scheme)
    exact = MXFP8QuantizationCompressor.decompress(stored, scheme)["weight"].double().numpy()
    config: dict[str, Any] = {
        "quant_method": "compressed-tensors",
        "format": "mxfp8-quantized",
        "config_groups": {"group_0": scheme.model_dump(mode="json")},
        "ignore": ["lm_head"],
    }
    found = check(config, as_arrays(stored["weight"], stored["weight_scale"]), UP, exact)
    assert (found.scheme.name, found.linears[UP].group_size) == ("fp8_weights", 32)
    assert not found.linears[UP].dynamic and "anew for every token" in found.notes[0]
    config["config_groups"]["group_0"]["weights"] |= {"strategy": "channel"}
    with pytest.raises(UnsupportedError, match=r"weights\.strategy: is 'channel'"):
        read(config, as_arrays(stored["weight"], stored["weight_scale"]))


def test_mxfp8_of_modelopt() -> None:
    weight = torch.from_numpy(np.random.default_rng(2).normal(0, 0.02, (24, 96))).float()
    exponents = MXFP8QTensor.get_weights_scaling_factor(weight)
    codes = MXFP8QTensor.quantize_with_scale(weight, exponents)
    exact = MXFP8QTensor(weight.shape, weight.dtype, codes).dequantize(scale=exponents)
    tensors = as_arrays(codes, exponents)
    declared = {"quant_method": "modelopt", "quant_algo": "MXFP8", "exclude_modules": ["lm_head"]}
    for config in (declared, {**declared, "group_size": 32}):
        found = check(config, tensors, UP, exact.double().numpy())
        assert (found.scheme.name, found.linears[UP].group_size) == ("fp8_weights", 32)
        assert "anew for every token" in found.notes[0]
    floats = {**tensors, f"{UP}.weight_scale": np.ones((24, 3), np.float32)}
    with pytest.raises(CheckpointError, match="has element type F32, its format stores U8"):
        read(declared, floats)


TOKEN = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token", "symmetric": True}
INPUT = {"location": "input", "targets": ["Linear"], "ignore": ["lm_head"]}
WEIGHT = {**INPUT, "location": "weight_input", "inverse": True}


def rotated(**changes: Any) -> dict[str, Any]:
    """A transform_config as llm-compressor writes it, but for `changes` of its one group."""
    group = {
        "type": "hadamard",
        "apply": [INPUT, WEIGHT],
        "randomize": False,
        "requires_grad": False,
        "head_dim": 16,
        "precision": "torch.float32",
        **changes,
    }
    return {"transform_config": {"config_groups": {"hadamard": group}}}


def int_quantized(activations: dict[str, Any] | None) -> tuple[dict[str, Any], dict[str, Any], Any]:
    rng = np.random.default_rng(0)
    weight = rng.integers(-128, 128, (16, 32)).astype(np.int8)
    scale = rng.uniform(0.1, 1, (16, 1)).astype(ml_dtypes.bfloat16)
    declared = packed(num_bits=8, strategy="channel")
    declared["format"] = "int-quantized"
    declared["config_groups"]["group_0"]["input_activations"] = activations
    tensors = {f"{Q}.weight": weight, f"{Q}.weight_scale": scale}
    return declared, tensors, weight.astype(np.float64) * scale.astype(np.float64)


def test_int_quantized_with_dynamic_activations() -> None:
    declared, tensors, exact = int_quantized(TOKEN)
    found = check(declared, tensors, Q, exact)
    assert found.scheme.name == "int8_dynamic" and found.linears[Q].dynamic
    assert not found.notes


@pytest.mark.parametrize(
    "modules",
    [
        {"targets": ["Linear"], "ignore": ["lm_head", O_PROJ]},
        {"targets": [Q], "ignore": []},
        {"targets": "re:.*q_proj"},
    ],
)
def test_rotations_are_of_the_linears_that_they_name(modules: dict[str, Any]) -> None:
    """What acts on the input is the stored weight times Sylvester's matrix of 16 over 4."""
    declared, tensors, exact = int_quantized(TOKEN)
    other = {name.replace("q_proj", "o_proj"): one for name, one in tensors.items()}
    steps = [{**modules, "location": one["location"]} for one in (INPUT, WEIGHT)]
    found = read(declared | rotated(apply=steps), tensors | other)
    assert (found.linears[Q].hadamard, found.linears[O_PROJ].hadamard) == (16, 0)
    parity = [[(i & j).bit_count() for j in range(16)] for i in range(16)]
    matrix = (-1.0) ** np.array(parity) / 4
    rotated_back = (exact.reshape(len(exact), -1, 16) @ matrix).reshape(exact.shape)
    np.testing.assert_allclose(dequantized(found, Q, tensors), rotated_back, rtol=1e-6, atol=1e-4)
    np.testing.assert_allclose(dequantized(found, O_PROJ, other), exact, rtol=1e-6)


@pytest.mark.parametrize("activations", [None, TOKEN | {"num_bits": 4}])
def test_rotations_of_other_activations_are_refused_by_name(activations: Any) -> None:
    declared, tensors, _ = int_quantized(activations)
    with pytest.raises(UnsupportedError, match=r"transform_config: is .*int8 by token"):
        read(declared | rotated(), tensors)


def test_rotations_of_unquantised_linears_are_refused_by_name() -> None:
    declared, tensors, _ = int_quantized(TOKEN)
    head = {"lm_head.weight": np.zeros((40, 32), ml_dtypes.bfloat16)}
    steps = [{**one, "ignore": []} for one in (INPUT, WEIGHT)]
    with pytest.raises(
        UnsupportedError, match=r"transform_config: is 'lm_head'.*quantised linears"
    ):
        read({**declared, "ignore": ["lm_head"]} | rotated(apply=steps), tensors | head)


@pytest.mark.parametrize(
    "other", [{"symmetric": False}, {"strategy": "tensor"}, {"type": "float"}, {"num_bits": 4}]
)
def test_dynamic_activations_of_other_kinds_stay_unquantised(other: dict[str, Any]) -> None:
    declared, tensors, exact = int_quantized(TOKEN | other)
    found = check(declared, tensors, Q, exact)
    assert found.scheme.name == "int8_weights" and not found.linears[Q].dynamic
    assert "anew for every token" in found.notes[0]


def test_int_quantized_with_static_activations() -> None:
    declared, tensors, exact = int_quantized(
        {"num_bits": 8, "type": "int", "dynamic": False, "strategy": "tensor", "symmetric": True}
    )
    tensors[f"{Q}.input_scale"] = np.array([0.5], np.float32)
    found = check(declared, tensors, Q, exact)
    assert found.scheme.activation == "i8"
    assert canonical(found.linears[Q], tensors)["input_scale"].shape == ()


def test_static_asymmetric_activations_are_refused() -> None:
    declared, tensors, _ = int_quantized(
        {"num_bits": 8, "type": "int", "dynamic": False, "strategy": "tensor", "symmetric": False}
    )
    with pytest.raises(UnsupportedError, match="symmetric"):
        read(declared, tensors)


@pytest.mark.parametrize("strategy", ["tensor", "channel", "block"])
def test_float_quantized(strategy: str) -> None:
    if strategy == "block":
        tensors, exact = fp8_block_linear(Q, 128, 256)
        tensors[f"{Q}.weight_scale"] = tensors.pop(f"{Q}.weight_scale_inv")
    else:
        tensors, exact = fp8_linear(Q, 16, 32, static=False)
        shape = (1,) if strategy == "tensor" else (16, 1)
        tensors[f"{Q}.weight_scale"] = np.full(shape, 0.037, np.float32)
    declared = packed(num_bits=8, type="float", strategy=strategy, block_structure=[128, 128])
    declared["format"] = "float-quantized"
    found = check(declared, tensors, Q, exact)
    assert found.linears[Q].weight == "f8e4m3"


@pytest.mark.parametrize("pattern", ["re:.*q_proj", Q, "q_proj"])
def test_quantised_module_in_the_ignore_list_is_contradictory(pattern: str) -> None:
    tensors, _ = packed_linear(Q, 16, 64, 16)
    with pytest.raises(CheckpointError, match=r"q_proj: .*excludes it"):
        read({**packed(group_size=16), "ignore": [pattern]}, tensors)


@pytest.mark.parametrize("pattern", ["re:.*q_", "*q_proj*", "proj", "model.layers.0"])
def test_sloppy_ignore_list_does_not_outdo_the_weights(pattern: str) -> None:
    tensors, _ = packed_linear(Q, 16, 64, 16)
    assert list(read({**packed(group_size=16), "ignore": [pattern]}, tensors).linears) == [Q]


def test_unquantised_modules_are_left_alone() -> None:
    tensors, _ = packed_linear(Q, 16, 64, 16)
    tensors[f"{UP}.weight"] = np.zeros((16, 64), ml_dtypes.bfloat16)
    assert list(read(packed(group_size=16), tensors).linears) == [Q]


def test_quantised_lm_head_is_refused() -> None:
    tensors, _ = packed_linear("lm_head", 16, 64, 16)
    with pytest.raises(UnsupportedError, match="lm_head"):
        read({**packed(group_size=16), "ignore": []}, tensors)


@pytest.mark.parametrize("name", ["scales", "qzeros"])
def test_missing_tensor_is_named(name: str) -> None:
    tensors, _ = awq_linear(Q, rows=8, columns=32, group=16)
    del tensors[f"{Q}.{name}"]
    with pytest.raises(CheckpointError, match=f"{name}: the tensor is missing"):
        read(AWQ, tensors)


def test_scale_of_the_wrong_shape_is_named() -> None:
    tensors, _ = awq_linear(Q, rows=8, columns=32, group=16)
    with pytest.raises(CheckpointError, match=r"scales: has shape \[2, 8\].*\[4, 8\]"):
        read({**AWQ, "group_size": 8}, tensors)


def test_group_that_does_not_divide_the_linear_is_named() -> None:
    tensors, _ = awq_linear(Q, rows=8, columns=32, group=16)
    with pytest.raises(UnsupportedError, match="no multiple of the group size 24"):
        read({**AWQ, "group_size": 24}, tensors)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "bitsandbytes"}, "quant_method: is 'bitsandbytes'"),
    ({"bits": 4}, "quant_method: is None"),
    ({**AWQ, "bits": 8}, "bits: is 8"),
    ({**AWQ, "version": "gemv"}, "version: is 'gemv'"),
    ({**AWQ, "group_size": "all"}, "group_size: is 'all'"),
    ({**GPTQ, "bits": 3}, "bits: is 3"),
    ({**GPTQ, "bits": 8, "sym": False}, "sym: is False"),
    ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format: is 'marlin'"),
    ({**GPTQ, "dynamic": {"+:(": {"bits": 8}}}, r"dynamic: is '\+:\('.*valid regular"),
    ({**GPTQ, "dynamic": {"+:x": {"format": "marlin"}}}, "dynamic: is .*overrides of bits, sym"),
    ({**GPTQ, "dynamic": {".*": 8}}, "dynamic: is "),
    ({**GPTQ, "dynamic": {"x" * 600: {}}}, "dynamic: is .*at most 512 letters"),
    ({**GPTQ, "dynamic": [".*"]}, "dynamic: is .*an object"),
    ({**FP8_BLOCK, "fmt": "e5m2"}, "fmt: is 'e5m2'"),
    ({**FP8_BLOCK, "activation_scheme": "static"}, "activation_scheme: is 'static'"),
    ({**FP8_BLOCK, "weight_block_size": [128]}, "weight_block_size"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4_SVD"}, "quant_algo: is 'NVFP4_SVD'"),
    ({"quant_method": "modelopt", "quant_algo": ["FP8"]}, "quant_algo"),
    (
        {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "NVFP4"},
        "kv_cache_quant_algo: is 'NVFP4'",
    ),
    ({**packed(group_size=16), "format": "mxfp6-pack-quantized"}, "format"),
    ({**packed(group_size=16), "config_groups": {}}, "config_groups"),
    ({**packed(group_size=16), "transform_config": {"R1": {}}}, "transform_config: is .*R1"),
    (packed(group_size=16) | rotated(type="random-hadamard"), "type: is 'random-hadamard'"),
    (packed(group_size=16) | rotated(randomize=True), "randomize: is True"),
    (packed(group_size=16) | rotated(head_dim=None), "head_dim: is None"),
    (packed(group_size=16) | rotated(head_dim=24), "head_dim: is 24"),
    (packed(group_size=16) | rotated(precision="torch.bfloat16"), "precision: is 'torch.bfloat16'"),
    (packed(group_size=16) | rotated(seed=1), "hadamard: is .*seed"),
    (packed(group_size=16) | rotated(apply=[INPUT]), "apply: is .*one input and one weight_input"),
    (packed(group_size=16) | rotated(apply=[INPUT, WEIGHT, WEIGHT]), "apply: is "),
    (packed(group_size=16) | rotated(apply=[INPUT, {**WEIGHT, "location": "output"}]), "apply: is"),
    (
        packed(group_size=16) | rotated(apply=[INPUT, {**WEIGHT, "targets": [Q]}]),
        "the same modules",
    ),
    ({**packed(group_size=16), "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24"),
    ({**packed(group_size=16), "kv_cache_scheme": {"type": "int", "num_bits": 8}}, "kv_cache"),
    (packed(strategy="channel", actorder="group"), "actorder: is 'group'"),
    (packed(group_size=16, actorder="random"), "actorder: is 'random'"),
    ({**GPTQ, "desc_act": 1}, "desc_act: is 1"),
    (
        {**packed(group_size=16, type="float"), "format": "mxfp4-pack-quantized"},
        "group_size: is 16",
    ),
    (packed(group_size=32) | {"format": "mxfp4-pack-quantized"}, "weights.type: is 'int'"),
    (packed(group_size=16, num_bits=2), "num_bits: is 2"),
    (packed(group_size=64, num_bits=6), "num_bits: is 6.*groups of a multiple of 128"),
    (packed(strategy="channel", num_bits=6), "num_bits: is 6"),
    (packed(group_size="all", num_bits=6), "group_size: is 'all'"),
    (packed(group_size=16, num_bits=8, symmetric=False), "symmetric: is False"),
    (packed(strategy="tensor_group"), "strategy: is 'tensor_group'"),
]


@pytest.mark.parametrize(("declared", "message"), REFUSED, ids=[m for _, m in REFUSED])
def test_refused_by_name(declared: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        read(declared, {})


def two_groups(first: list[str], second: list[str], **settings: Any) -> dict[str, Any]:
    """Groups of 16 and of 32 channels, each for linears of its own."""
    declared = packed(group_size=16)
    other = packed(group_size=32)["config_groups"]["group_0"]
    declared["config_groups"]["group_0"]["targets"] = first
    declared["config_groups"]["group_1"] = {**other, "targets": second, **settings}
    return declared


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([Q], [O_PROJ]),
        (["re:.*q_proj"], ["Linear"]),
        (["Linear"], [O_PROJ, "re:.*never"]),
        ([Q], ["o_proj"]),
    ],
)
def test_groups_of_settings_are_of_the_linears_that_they_name(
    first: list[str], second: list[str]
) -> None:
    q, exact_q = packed_linear(Q, 24, 64, 16)
    o, exact_o = packed_linear(O_PROJ, 24, 64, 32, seed=1)
    tensors = {**q, **o}
    found = read(two_groups(first, second), tensors)
    assert {name: one.group_size for name, one in found.linears.items()} == {Q: 16, O_PROJ: 32}
    np.testing.assert_allclose(dequantized(found, Q, tensors), exact_q, rtol=1e-6)
    np.testing.assert_allclose(dequantized(found, O_PROJ, tensors), exact_o, rtol=1e-6)
    assert (found.scheme.name, found.scheme.weight, found.scheme.group_size) == ("mixed", "i4", 32)


def test_groups_that_contradict_the_weights_are_refused() -> None:
    tensors, _ = packed_linear(Q, 24, 64, 16)
    with pytest.raises(CheckpointError, match=f"{Q}.*no config group names it"):
        read(two_groups([O_PROJ], ["v_proj"]), tensors)
    with pytest.raises(CheckpointError, match="weight_scale"):
        read(two_groups([O_PROJ], [Q]), tensors)
    static = {"num_bits": 8, "type": "int", "dynamic": False, "strategy": "tensor"}
    eight = {**packed()["config_groups"]["group_0"]["weights"], "num_bits": 8, "group_size": 16}
    with pytest.raises(UnsupportedError, match="input_activations: is 'static'"):
        read(two_groups([Q], [O_PROJ], weights=eight, input_activations=static), tensors)


def test_config_without_quantised_weights_is_contradictory() -> None:
    with pytest.raises(CheckpointError, match="no weight is"):
        read(AWQ, {f"{Q}.weight": np.zeros((4, 4), ml_dtypes.bfloat16)})


def test_quantised_weights_without_a_config_are_refused() -> None:
    tensors, _ = fp8_linear(Q, 4, 4, static=False)
    with pytest.raises(CheckpointError, match=r"q_proj\.weight: holds F8_E4M3"):
        read_quantization({}, None, headers(tensors))


def test_unquantised_checkpoint_is_none() -> None:
    tensors = {f"{Q}.weight": np.zeros((4, 4), ml_dtypes.bfloat16)}
    assert read_quantization({}, None, headers(tensors)) is None


@pytest.mark.parametrize("config", [{"quantization_config": "fp8"}, {"quantization_config": []}])
def test_config_that_is_no_object(config: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="not an object"):
        read_quantization(config, None, {})
