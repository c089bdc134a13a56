"""Whatever a checkpoint holds, a build is refused in one line or described in bounded time."""

import itertools
import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

from tests.builder.test_families import config_of
from tests.support.models import FAMILIES
from trtc.builder.checkpoint.reader import SafetensorsReader
from trtc.builder.request import BuildRequest
from trtc.builder.source import ModelSource, open_source
from trtc.protos.errors import CheckpointError, RequestError, TrtcError

MAX_CASE_S = 20.0
"""The slowest takes 0.1 s on a machine with nothing else to do."""
CASES_OF_A_FAMILY = 120
DEEP = json.loads("[" * 400 + "]" * 400)
VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 3, 7, 0.5, -0.0, 1e-300, 1e308, -1e308, 10**9, 2**31, 2**40,
    2**63, 10**400, "", "x" * 100_000, "NaN", [], [0], ["x"] * 9, [[]], DEEP, {}, {"a": 1},
    {"a": {}},
)  # fmt: skip


def fields_of(family: str) -> dict[str, Any]:
    return config_of(family)


def opened(folder: Path, fields: dict[str, Any], **files: str) -> ModelSource:
    (folder / "config.json").write_text(json.dumps(fields))
    for name, text in files.items():
        (folder / f"{name}.json").write_text(text)
    request = BuildRequest(model=str(folder), output=folder / "engine", dummy_weights=True)
    return open_source(request)


def ends_in_one_line(folder: Path, fields: dict[str, Any], **files: str) -> None:
    began = time.monotonic()
    try:
        source = opened(folder, fields, **files)
    except TrtcError as error:
        assert len(str(error)) < 600, str(error)[:600]
        assert "\n" not in str(error)
    else:
        assert source.spec.layers
    assert time.monotonic() - began < MAX_CASE_S


@pytest.mark.parametrize("family", FAMILIES)
def test_any_value_in_any_field_is_described_or_refused(family: str, tmp_path: Path) -> None:
    fields = fields_of(family)
    rope = "rope_parameters" if fields.get("rope_parameters") else "rope_scaling"
    inner = fields.get(rope) or {}
    places = [(None, key) for key in fields] + [(rope, key) for key in inner]
    cases = list(itertools.product(places, VALUES))
    chosen = random.Random(family).sample(cases, CASES_OF_A_FAMILY)
    for (outer, key), value in chosen:
        changed = {outer: {**inner, key: value}} if outer else {key: value}
        ends_in_one_line(tmp_path, {**fields, **changed})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", 10**9),
        ("head_dim", 2**40),
        ("hidden_size", 2**40),
        ("hidden_size", -64),
        ("intermediate_size", 2**62),
        ("num_attention_heads", 2**20),
        ("num_key_value_heads", 3),
        ("vocab_size", 2**31),
        ("vocab_size", 1.5),
        ("max_position_embeddings", 2**31),
        ("rms_norm_eps", -1),
        ("rms_norm_eps", 1e308),
        ("rms_norm_eps", "small"),
        ("eos_token_id", [2**31]),
        ("eos_token_id", list(range(5000))),
        ("eos_token_id", "x" * 100_000),
        ("architectures", []),
    ],
)
def test_a_value_out_of_range_names_its_field(field: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        opened(tmp_path, {**fields_of("llama"), field: value})
    assert field in caught.value.field
    assert "config.json" in caught.value.field


@pytest.mark.parametrize("theta", [0, -1, 1, 1e300, float(2**60)])
def test_a_rope_base_out_of_range_is_refused(theta: float, tmp_path: Path) -> None:
    fields = fields_of("llama")
    fields["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
    with pytest.raises(CheckpointError, match="rope_theta"):
        opened(tmp_path, fields)


def test_layers_times_experts_is_bounded(tmp_path: Path) -> None:
    fields = {**fields_of("mixtral"), "num_hidden_layers": 1000, "num_local_experts": 4000}
    with pytest.raises(CheckpointError, match="4000 in each of 1000 layers"):
        opened(tmp_path, fields)


def test_minus_one_is_no_token(tmp_path: Path) -> None:
    source = opened(tmp_path, {**fields_of("llama"), "pad_token_id": -1, "eos_token_id": [-1, 5]})
    assert source.spec.pad_token_id is None
    assert source.spec.eos_token_ids == (5,)


@pytest.mark.parametrize("name", ["config", "generation_config", "hf_quant_config"])
@pytest.mark.parametrize(
    "text",
    ["", "[]", "null", '"x"', "{", "[" * 1_000_000, '{"a":' * 1_000_000, '{"eos_token_id": NaN}'],
)
def test_json_that_is_no_object_names_its_file(name: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        fields = fields_of("llama")
        if name == "config":
            (tmp_path / "config.json").write_text(text)
            open_source(BuildRequest(str(tmp_path), tmp_path / "engine", dummy_weights=True))
        opened(tmp_path, fields, **{name: text})
    assert f"{name}.json" in caught.value.field


def test_a_length_beyond_the_models_is_a_request_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields_of("llama")))
    for length in (-1, 2**62):
        request = BuildRequest(
            str(tmp_path), tmp_path / "engine", dummy_weights=True, max_seq_len=length
        )
        with pytest.raises(RequestError, match="--max-seq-len"):
            open_source(request)


def header(entry: str, name: str = "a", data: bytes = b"") -> bytes:
    text = f'{{"{name}": {entry}}}'.encode()
    return len(text).to_bytes(8, "little") + text + data


FLOATS = '{"dtype": "F32", "shape": [%s], "data_offsets": [0, %d]}'
HEADERS = {
    "empty": b"",
    "nested": header('{"a":' * 1_000_000),
    "nested shape": header('{"dtype": "F32", "shape": ' + "[" * 100_000),
    "enormous sizes": header(FLOATS % (f"{2**61}, 0", 0)),
    "many dimensions": header(FLOATS % (", ".join("1" * 80), 4), data=bytes(4)),
    "a long name": header(FLOATS % ("1", 4), name="n" * 1_000_000, data=bytes(4)),
    "a tensor twice": header(
        FLOATS % ("1", 4) + ', "\\u0061": ' + FLOATS % ("1", 4), data=bytes(4)
    ),
    "an offset twice": header(
        '{"dtype": "F32", "shape": [2], "shape": [1], "data_offsets": [0, 4]}', data=bytes(4)
    ),
    "offsets beyond 64 bits": header(
        '{"dtype": "F32", "shape": [1], "data_offsets": [18446744073709551612, 1]}'
    ),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_forged_safetensors_header_is_one_line(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(HEADERS[name])
    with pytest.raises(CheckpointError) as caught:
        SafetensorsReader(tmp_path)
    assert caught.value.field == str(path)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("file", ["../x", "/etc/passwd", "..", "", "x\0", "x" * 100_000])
def test_a_forged_index_is_one_line(file: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(CheckpointError) as caught:
        SafetensorsReader(tmp_path)
    assert caught.value.field == str(path)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("name", ["a tensor twice", "an offset twice"])
def test_a_safetensors_header_with_a_key_twice_names_it(name: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(HEADERS[name])
    key = {"a tensor twice": "'a'", "an offset twice": "'shape'"}[name]
    with pytest.raises(CheckpointError, match=f"the key {key} twice"):
        SafetensorsReader(tmp_path)


def test_an_index_with_a_tensor_twice_names_it(tmp_path: Path) -> None:
    for file in ("x.safetensors", "y.safetensors"):
        (tmp_path / file).write_bytes(header(FLOATS % ("1", 4), data=bytes(4)))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}')
    with pytest.raises(CheckpointError, match="the key 'a' twice") as caught:
        SafetensorsReader(tmp_path)
    assert caught.value.field == str(index)


@pytest.mark.parametrize("name", ["config", "generation_config", "hf_quant_config"])
def test_a_configuration_with_a_key_twice_names_it(name: str, tmp_path: Path) -> None:
    fields = fields_of("llama")
    (tmp_path / "config.json").write_text(json.dumps(fields))
    twice = '{"outer": [{"top_k": 1, "top_k": 2}]}'
    if name == "config":
        twice = json.dumps(fields)[:-1] + ', "vocab_size": 1000000}'
    (tmp_path / f"{name}.json").write_text(twice)
    with pytest.raises(CheckpointError, match=r"the key '(top_k|vocab_size)' twice") as caught:
        open_source(BuildRequest(str(tmp_path), tmp_path / "engine", dummy_weights=True))
    assert caught.value.field == str(tmp_path / f"{name}.json")
