"""Whatever a quantisation config holds, it is refused in one line that names it, or understood."""

import copy
import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.quant.test_prequantized import (
    AWQ,
    FP8_BLOCK,
    GPTQ,
    TOKEN,
    Q,
    int_quantized,
    nvfp4_with_inputs,
    packed,
    rotated,
)
from tests.support.quantized import (
    awq_linear,
    canonical,
    fp8_block_linear,
    fp8_linear,
    gptq_linear,
    headers,
    nvfp4_linear,
    packed_linear,
)
from trtc.builder.checkpoint.checkpoint import open_checkpoint
from trtc.protos.errors import CheckpointError, TrtcError, UnsupportedError
from trtc.quant.prequantized import read_quantization

MAX_CASE_S = 20.0
DEEP = json.loads("[" * 400 + "]" * 400)
VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 3, 0.5, -0.0, 1e308, float("nan"), 10**9, 2**63, 10**400,
    -(2**64), "", "x" * 100_000, "a\nb", "NaN", [], [0], [0, 0], [-1, 2**70], [True, 4], ["x"] * 9,
    [[]], DEEP, [None], [{"a": 1}], ["re:("], ["re:" + "(" * 500], {}, {"a": 1}, {"a": {}},
    {"a": None}, {"group_0": []}, {"group_0": {"weights": []}}, {"type": [], "num_bits": {}},
)  # fmt: skip
MODELOPT = {
    "quant_method": "modelopt",
    "quant_algo": "FP8",
    "kv_cache_quant_algo": None,
    "kv_cache_scheme": {"type": "float", "num_bits": 8, "dynamic": False},
    "group_size": None,
    "has_zero_point": False,
    "exclude_modules": ["lm_head"],
    "ignore": [],
}


def float_quantized() -> dict[str, Any]:
    declared = packed(num_bits=8, type="float", strategy="block", block_structure=[128, 128])
    group = declared["config_groups"]["group_0"]
    group["input_activations"] = {"dynamic": True, "num_bits": 8, "type": "float", "strategy": "x"}
    scheme = {"type": "float", "num_bits": 8, "strategy": "tensor", "dynamic": False}
    sparsity = {"format": "dense"}
    return {
        **declared,
        "format": "float-quantized",
        "kv_cache_scheme": scheme,
        "sparsity_config": sparsity,
        "transform_config": None,
    }


def block_weight() -> dict[str, Any]:
    tensors, _ = fp8_block_linear(Q, 130, 256)
    tensors[f"{Q}.weight_scale"] = tensors.pop(f"{Q}.weight_scale_inv")
    return tensors


FORMATS: Mapping[str, tuple[dict[str, Any], Callable[[], dict[str, Any]]]] = {
    "awq": (
        {**AWQ, "modules_to_not_convert": ["lm_head"], "w_bit": 4, "q_group_size": 16},
        lambda: awq_linear(Q, rows=24, columns=64, group=16)[0],
    ),
    "gptq": (
        {
            **GPTQ,
            "dynamic": {"+:.*": {"bits": 4, "sym": True}, "-:x": {}},
            "static_groups": False,
            "checkpoint_format": "gptq",
        },
        lambda: gptq_linear(Q, 16, 64, 16)[0],
    ),
    "fp8": (
        {**FP8_BLOCK, "fmt": "e4m3", "ignored_layers": ["lm_head"]},
        lambda: fp8_block_linear(Q, 130, 256)[0],
    ),
    "modelopt": (MODELOPT, lambda: fp8_linear(Q, 16, 32, static=True)[0]),
    "packed": (packed(group_size=16), lambda: packed_linear(Q, 16, 64, 16)[0]),
    "float": (float_quantized(), block_weight),
    "nvfp4": (nvfp4_with_inputs(), lambda: nvfp4_linear(Q, 16, 64)[0]),
    "rotated": (
        int_quantized(TOKEN)[0] | rotated(),
        lambda: int_quantized(TOKEN)[1],
    ),
    "mxfp4": (
        {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head", "model.layers.*.mlp"]},
        lambda: {
            f"{Q}_blocks": np.zeros((2, 6, 3, 16), np.uint8),
            f"{Q}_scales": np.full((2, 6, 3), 127, np.uint8),
        },
    ),
}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of every value in a config, itself included."""
    if path:
        yield path
    items: Any = value.items() if isinstance(value, dict) else ()
    if isinstance(value, list):
        items = enumerate(value)
    for key, inner in items:
        yield from places(inner, (*path, key))


def changed(config: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    result = copy.deepcopy(config)
    parent: Any = result
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    return result


def ends_in_one_line(
    config: dict[str, Any], quantization: dict[str, Any] | None, tensors: dict[str, Any]
) -> None:
    began = time.monotonic()
    try:
        found = read_quantization(config, quantization, headers(tensors))
        for linear in found.linears.values() if found else ():
            canonical(linear, tensors)
    except TrtcError as error:
        text = str(error)
        assert len(text) < 600 and "\n" not in text, text[:600]
        assert error.field.startswith(("config.json: quantization_config", Q)) or (
            quantization is not None and error.field.startswith("hf_quant_config.json: quant")
        ), text
    assert time.monotonic() - began < MAX_CASE_S


@pytest.mark.parametrize("name", FORMATS)
def test_any_value_in_any_field_is_read_or_refused(name: str) -> None:
    config, write = FORMATS[name]
    tensors = write()
    read_quantization({"quantization_config": config}, None, headers(tensors))
    for path in places(config):
        for value in VALUES:
            forged = changed(config, path, value)
            ends_in_one_line({"quantization_config": forged}, None, tensors)


@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:20])
def test_a_config_that_is_anything_else(value: Any) -> None:
    tensors = fp8_linear(Q, 16, 32, static=True)[0]
    ends_in_one_line({"quantization_config": value}, None, tensors if value else {})
    ends_in_one_line({}, {"quantization": value}, tensors)
    for field in MODELOPT:
        ends_in_one_line({}, {"quantization": {**MODELOPT, field: value}}, tensors)


def test_the_file_of_a_field_is_named() -> None:
    tensors = headers(fp8_linear(Q, 16, 32, static=True)[0])
    with pytest.raises(UnsupportedError) as caught:
        read_quantization({"quantization_config": {**AWQ, "bits": 3}}, None, tensors)
    assert caught.value.field == "config.json: quantization_config.bits"
    with pytest.raises(UnsupportedError) as caught:
        read_quantization({}, {"quantization": {"quant_algo": 3}}, tensors)
    assert caught.value.field == "hf_quant_config.json: quantization.quant_algo"


@pytest.fixture
def one_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of five, for all regular expressions of a config."""
    monkeypatch.setattr("trtc.quant.formats.module_regexes._MAX_SECONDS", 1.0)


@pytest.mark.usefixtures("one_second")
@pytest.mark.parametrize(
    "pattern",
    [
        r"re:(.*)(.*)(.*)(.*)(.*)(.*)(.*)(.*)\1\2\3\4\5[A-Z]",
        r"re:(a|aa|.)+(?!.)[A-Z]?$(?<=[A-Z])",
        r"re:(?:(.)|(.)\2?)+[^a-z]",
    ],
)
def test_expressions_that_backtrack_forever_are_refused(pattern: str) -> None:
    prefix = "model.layers.0." + "a" * 200 + ".q_proj"
    tensors = packed_linear(prefix, 16, 64, 16)[0]
    config = {**packed(group_size=16), "ignore": [pattern]}
    began = time.monotonic()
    with pytest.raises(UnsupportedError, match=r"quantization_config\.ignore: is 're:") as caught:
        read_quantization({"quantization_config": config}, None, headers(tensors))
    assert "at most 1 s" in str(caught.value)
    assert time.monotonic() - began < 60


@pytest.mark.usefixtures("one_second")
def test_rules_that_backtrack_forever_are_refused() -> None:
    prefix = "model.layers.0." + "a" * 200 + ".q_proj"
    rules = {r"+:(.*)(.*)(.*)(.*)(.*)(.*)(.*)(.*)\1\2\3\4\5[A-Z]": {"bits": 4}}
    config = {**GPTQ, "dynamic": rules}
    tensors = gptq_linear(prefix, 16, 64, 16)[0]
    with pytest.raises(UnsupportedError, match=r"quantization_config\.dynamic: is '\+:.*at most 1"):
        read_quantization({"quantization_config": config}, None, headers(tensors))


def test_many_modules_against_a_long_list_take_no_time() -> None:
    """As of a model with hundreds of experts a layer: a product of both would take minutes."""
    one = fp8_linear("x", 4, 4, static=False)[0]
    tensors = {
        f"model.layers.0.experts.{expert}.up_proj.{name.removeprefix('x.')}": tensor
        for expert in range(20_000)
        for name, tensor in one.items()
    }
    listed = [f"model.layers.1.experts.{expert}.up_proj" for expert in range(400_000)]
    config = {"quant_method": "fp8", "modules_to_not_convert": listed}
    began = time.monotonic()
    found = read_quantization({"quantization_config": config}, None, headers(tensors))
    assert found is not None and len(found.linears) == 20_000
    assert time.monotonic() - began < MAX_CASE_S


@pytest.mark.parametrize(
    "listed",
    [
        ["x"] * 500_001,
        [f"re:{i}" for i in range(1001)],
        ["x" * 100_000],
        "lm_head",
        {"lm_head": 1},
        7,
    ],
    ids=["names", "expressions", "long", "text", "object", "number"],
)
@pytest.mark.parametrize("name", ["awq", "fp8", "modelopt", "packed"])
def test_a_list_that_is_none_or_too_long_is_refused(name: str, listed: Any) -> None:
    field = {"awq": "modules_to_not_convert", "fp8": "ignored_layers", "packed": "ignore"}
    config, write = FORMATS[name]
    spelled = field.get(name, "exclude_modules")
    forged = {"quantization_config": {**config, spelled: listed}}
    with pytest.raises(UnsupportedError, match=rf"config\.json: quantization_config\.{spelled}"):
        read_quantization(forged, None, headers(write()))


def test_a_block_larger_than_the_weight_takes_no_memory() -> None:
    tensors, _ = fp8_block_linear(Q, 16, 32)
    config = {**FP8_BLOCK, "weight_block_size": [2**80, 2**80]}
    found = read_quantization({"quantization_config": config}, None, headers(tensors))
    assert found is not None
    scale = canonical(found.linears[Q], tensors)["weight_scale"]
    assert scale.shape == (16, 1)


@pytest.mark.parametrize(
    "text", ['{"quantization_config": NaN}', '{"a": 1e999999}', '{"a": -Infinity}']
)
def test_numbers_that_are_none_are_no_json(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(str(tmp_path))
    assert caught.value.field == str(tmp_path / "config.json")


@pytest.mark.parametrize("name", ["config.json", "hf_quant_config.json", "generation_config.json"])
def test_a_configuration_of_many_megabytes_is_not_read(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with (tmp_path / name).open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(CheckpointError, match="more than the 16777216 that are read") as caught:
        open_checkpoint(str(tmp_path))
    assert caught.value.field == str(tmp_path / name)
