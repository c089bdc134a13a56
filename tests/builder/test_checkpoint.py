"""Checkpoints in every state that a user's disk can hold them."""

import gc
import json
import mmap
import struct
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from tests.support.models import tiny_checkpoint
from trtc.builder.checkpoint.checkpoint import open_checkpoint
from trtc.builder.checkpoint.dummy import DummyReader, dummy_checkpoint
from trtc.builder.checkpoint.reader import SafetensorsReader
from trtc.builder.checkpoint.resolve import hub_commit
from trtc.builder.checkpoint.safetensors import read_header
from trtc.builder.checkpoint.verify import check_tensors, expected_tensors, settle_embeddings
from trtc.builder.families.registry import checkpoint_spec, decoder_spec
from trtc.protos.errors import CheckpointError, RequestError
from trtc.quant.scheme import SCHEMES


def write_raw(path: Path, header: Any, data: bytes = b"") -> Path:
    """A safetensors file with any header at all."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(begin: int, end: int, shape: tuple[int, ...] = (2,), dtype: str = "F32") -> Any:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def edit_config(directory: Path, **fields: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


# --- reading ---------------------------------------------------------------------------------


def test_reads_every_element_type_as_the_safetensors_library_wrote_it(tmp_path: Path) -> None:
    values = np.arange(-8, 8).reshape(2, 8)
    tensors = {
        np.dtype(dtype).name: values.astype(dtype)
        for dtype in (np.float32, np.float16, np.float64, np.int8, np.int32, np.int64, np.uint8)
    }
    tensors["empty"] = np.zeros((0, 4), dtype=np.float32)
    tensors["scalar"] = np.asarray(2.5, dtype=np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    reader = SafetensorsReader(tmp_path)
    assert reader.names == tuple(sorted(tensors))
    for name, expected in tensors.items():
        found = reader.read(name)
        assert found.dtype == expected.dtype and found.shape == expected.shape
        np.testing.assert_array_equal(found, expected)


def test_reads_bfloat16_and_float8_bit_for_bit(tmp_path: Path) -> None:
    header = {
        "half": entry(0, 4, (2,), "BF16"),
        "byte": entry(4, 6, (2,), "F8_E4M3"),
        "__metadata__": {"format": "pt"},
    }
    write_raw(tmp_path / "model.safetensors", header, bytes.fromhex("803f 00c0 38 c0"))
    reader = SafetensorsReader(tmp_path)
    assert reader.read("half").dtype == ml_dtypes.bfloat16
    assert reader.read("half").tolist() == [1.0, -2.0]
    assert reader.read("byte").dtype == ml_dtypes.float8_e4m3fn
    assert reader.read("byte").tolist() == [1.0, -2.0]
    assert reader.tensors == {"byte": ("F8_E4M3", (2,)), "half": ("BF16", (2,))}
    assert reader.num_bytes == 6


def test_views_are_read_only_and_outlive_later_reads(tmp_path: Path) -> None:
    save_file({"a": np.arange(5000.0), "b": np.ones(5000)}, tmp_path / "model.safetensors")
    reader = SafetensorsReader(tmp_path)
    first = reader.read("a")
    with pytest.raises(ValueError, match="read-only"):
        first[0] = 1
    reader.read("b")
    np.testing.assert_array_equal(first, np.arange(5000.0))


def test_resident_memory_stays_near_one_tensor(tmp_path: Path) -> None:
    megabytes = 16
    tensor = np.ones((megabytes, 1 << 18), dtype=np.float32)
    save_file({f"t{index}": tensor for index in range(12)}, tmp_path / "model.safetensors")
    del tensor
    gc.collect()
    reader = SafetensorsReader(tmp_path)
    before = resident_bytes()
    peak = 0
    for name in reader.names:
        assert float(reader.read(name).sum()) == megabytes << 18
        peak = max(peak, resident_bytes() - before)
    assert peak < 3 * megabytes << 20


def test_sharded_checkpoints_read_like_single_ones(tmp_path: Path) -> None:
    whole = tiny_checkpoint("qwen2", tmp_path / "whole")
    sharded = tiny_checkpoint("qwen2", tmp_path / "sharded", max_shard_size="60KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    one, many = SafetensorsReader(whole), SafetensorsReader(sharded)
    assert one.names == many.names
    for name in one.names:
        np.testing.assert_array_equal(one.read(name), many.read(name))


# --- damage ----------------------------------------------------------------------------------

DAMAGE: Mapping[str, tuple[Callable[[Path], Any], str]] = {
    "empty": (lambda p: p.write_bytes(b""), "truncated"),
    "seven bytes": (lambda p: p.write_bytes(b"\x08" + bytes(6)), "truncated"),
    "header longer than the file": (
        lambda p: p.write_bytes(struct.pack("<Q", 500) + b"{}"),
        "truncated",
    ),
    "absurd header": (lambda p: p.write_bytes(b"\xff" * 64), "not a safetensors file"),
    "not json": (lambda p: write_raw(p, b'{"a": '), "corrupt header"),
    "not utf-8": (lambda p: write_raw(p, b'{"\xff": 1}'), "corrupt header"),
    "entry of the wrong form": (lambda p: write_raw(p, {"a": 5}), "corrupt header"),
    "data cut short": (lambda p: write_raw(p, {"a": entry(0, 8)}, bytes(7)), "truncated"),
    "offsets past the end": (lambda p: write_raw(p, {"a": entry(0, 8)}), "truncated"),
    "overlap": (
        lambda p: write_raw(p, {"a": entry(0, 8), "b": entry(4, 12)}, bytes(12)),
        "tensor b overlaps a",
    ),
    "gap": (lambda p: write_raw(p, {"a": entry(4, 12)}, bytes(12)), "unused"),
    "bytes left over": (lambda p: write_raw(p, {"a": entry(0, 8)}, bytes(9)), "1 bytes after"),
    "shape against offsets": (
        lambda p: write_raw(p, {"a": entry(0, 8, (3,))}, bytes(8)),
        "needs 12 bytes",
    ),
    "backward offsets": (lambda p: write_raw(p, {"a": entry(8, 0)}, bytes(8)), "8..0"),
    "negative shape": (lambda p: write_raw(p, {"a": entry(0, 8, (-2,))}, bytes(8)), "shape"),
    "unknown type": (
        lambda p: write_raw(p, {"a": entry(0, 8, (2,), "F32_X")}, bytes(8)),
        "'F32_X'",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_files_are_refused_by_name(name: str, tmp_path: Path) -> None:
    damage, message = DAMAGE[name]
    path = tmp_path / "model.safetensors"
    damage(path)
    with pytest.raises(CheckpointError, match=message) as caught:
        SafetensorsReader(tmp_path)
    assert str(path) in caught.value.field and caught.value.remedy


@pytest.mark.parametrize("cut", [1, 9, 300, 5000])
def test_a_download_cut_anywhere_is_noticed(cut: int, tmp_path: Path) -> None:
    path = tiny_checkpoint("llama", tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(CheckpointError, match="truncated"):
        read_header(path)


@settings(max_examples=300)
@given(st.data())
def test_no_flipped_byte_does_worse_than_a_checkpoint_error(data: st.DataObject) -> None:
    header = {"a": entry(0, 8), "b": entry(8, 12, (1,)), "__metadata__": {"format": "pt"}}
    with tempfile.TemporaryDirectory() as directory:
        path = write_raw(Path(directory) / "model.safetensors", header, bytes(12))
        content = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 3))):
            index = data.draw(st.integers(0, len(content) - 1))
            content[index] = data.draw(st.integers(0, 255))
        path.write_bytes(content)
        try:
            reader = SafetensorsReader(Path(directory))
        except CheckpointError:
            return
        for name, (_, shape) in reader.tensors.items():
            assert reader.read(name).shape == shape


def test_a_single_file_wins_over_an_index_beside_it(tmp_path: Path) -> None:
    save_file({"a": np.ones(2)}, tmp_path / "model.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert SafetensorsReader(tmp_path).names == ("a",)


def test_a_missing_file_is_a_checkpoint_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No such file"):
        read_header(tmp_path / "absent.safetensors")


def test_pickles_are_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin.*runs any code") as caught:
        SafetensorsReader(tmp_path)
    assert "save_pretrained" in caught.value.remedy


def test_a_directory_without_weights_says_what_it_looked_for(tmp_path: Path) -> None:
    save_file({"a": np.ones(2)}, tmp_path / "weights.safetensors")
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors.*weights\.safetensors"):
        SafetensorsReader(tmp_path)


def test_an_index_that_names_absent_shards(tmp_path: Path) -> None:
    path = tiny_checkpoint("llama", tmp_path, max_shard_size="60KB")
    shard = sorted(path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=shard.name):
        SafetensorsReader(path)


def test_an_index_that_puts_a_tensor_where_it_is_not(tmp_path: Path) -> None:
    path = tiny_checkpoint("llama", tmp_path, max_shard_size="60KB")
    index = path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.extra.weight"] = content["weight_map"]["model.norm.weight"]
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"model\.extra\.weight"):
        SafetensorsReader(path)


@pytest.mark.parametrize(
    "text", ["{", "{}", '{"weight_map": {"a": 1}}', '{"weight_map": {"a": "../b"}}']
)
def test_a_broken_index(text: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        SafetensorsReader(tmp_path)


def test_one_tensor_in_two_shards(tmp_path: Path) -> None:
    for file in ("x.safetensors", "y.safetensors"):
        save_file({"a": np.ones(2)}, tmp_path / file)
    save_file({"a": np.ones(2), "b": np.ones(2)}, tmp_path / "y.safetensors")
    index = {"weight_map": {"a": "x.safetensors", "b": "y.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="tensor a is in"):
        SafetensorsReader(tmp_path)


# --- directory, config, tokenizer ------------------------------------------------------------


def test_the_bundled_checkpoint_opens_whole() -> None:
    checkpoint = open_checkpoint("examples/models/pyllama/")
    assert checkpoint.name == "pyllama"
    assert checkpoint.has_tokenizer
    assert {file.name for file in checkpoint.tokenizer_files} >= {
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
    }
    generation = json.loads(Path("examples/models/pyllama/generation_config.json").read_text())
    spec = checkpoint_spec(checkpoint, 128)
    assert list(spec.eos_token_ids) == generation["eos_token_id"]
    assert check_tensors(spec, checkpoint.open_weights()) == ()


def test_a_checkpoint_without_tokenizer_has_no_tokenizer_files(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(tiny_checkpoint("llama", tmp_path)))
    assert not checkpoint.has_tokenizer and checkpoint.tokenizer_files == ()


@pytest.mark.parametrize("text", ["", "{", "[]", "\xff"])
def test_an_unreadable_config(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match="not a JSON object"):
        open_checkpoint(str(tmp_path))


def test_a_directory_without_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read"):
        open_checkpoint(str(tmp_path))


def test_a_path_that_does_not_exist() -> None:
    with pytest.raises(CheckpointError, match="no such directory"):
        open_checkpoint("/nowhere/at/all")


def test_a_file_instead_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match="is a file"):
        open_checkpoint(str(tmp_path / "model.gguf"))


def test_a_hub_name_offline_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="hub cannot be reached") as caught:
        open_checkpoint("some-owner/some-model")
    assert "hf download some-owner/some-model" in caught.value.remedy


def test_a_hub_name_is_found_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    snapshots = tmp_path / "models--some-owner--some-model" / "snapshots"
    snapshots.mkdir(parents=True)
    made = tiny_checkpoint("llama", tmp_path).rename(snapshots / ("a" * 40))
    asked: dict[str, Any] = {}

    def snapshot_download(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return str(made)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    checkpoint = open_checkpoint("some-owner/some-model", "main")
    assert checkpoint.name == "some-model" and checkpoint.path == made
    assert asked["revision"] == "main"
    assert not any("bin" in pattern or "py" in pattern for pattern in asked["allow_patterns"])


def test_a_directory_has_no_revisions(tmp_path: Path) -> None:
    path = tiny_checkpoint("llama", tmp_path)
    with pytest.raises(RequestError, match=r"--revision: is 'main', and .* is a directory"):
        open_checkpoint(str(path), "main")
    assert hub_commit(path) is None


def test_a_text_config_inside_a_config_is_found(tmp_path: Path) -> None:
    path = tiny_checkpoint("llama", tmp_path)
    config = json.loads((path / "config.json").read_text())
    architectures = config.pop("architectures")
    (path / "config.json").write_text(
        json.dumps({"architectures": architectures, "text_config": config})
    )
    assert decoder_spec(open_checkpoint(str(path)).config, 64).hidden_size == 64


# --- config against tensors ------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3", "qwen3_moe", "mixtral", "qwen3"])
def test_expected_tensors_are_those_that_transformers_saves(family: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(tiny_checkpoint(family, tmp_path)))
    reader = checkpoint.open_weights()
    spec = decoder_spec(checkpoint.config, 64)
    assert {name: shape for name, (_, shape) in reader.tensors.items()} == expected_tensors(spec)
    assert check_tensors(spec, reader) == ()


def test_a_shape_that_contradicts_the_config_names_both(tmp_path: Path) -> None:
    path = tiny_checkpoint("llama", tmp_path)
    edit_config(path, intermediate_size=80)
    checkpoint = open_checkpoint(str(path))
    with pytest.raises(CheckpointError, match=r"gate_proj\.weight is \[96, 64\].*\[80, 64\]"):
        check_tensors(decoder_spec(checkpoint.config, 64), checkpoint.open_weights())


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    path = tiny_checkpoint("llama", tmp_path)
    edit_config(path, num_hidden_layers=3)
    checkpoint = open_checkpoint(str(path))
    with pytest.raises(CheckpointError, match=r"model\.layers\.2\..* and 4 more"):
        check_tensors(decoder_spec(checkpoint.config, 64), checkpoint.open_weights())
    with pytest.raises(CheckpointError, match=r"model\.layers\.2\.mlp"):
        checkpoint.open_weights().read("model.layers.2.mlp.up_proj.weight")


def test_unexpected_tensors_are_reported(tmp_path: Path) -> None:
    path = tiny_checkpoint("llama", tmp_path)
    edit_config(path, num_hidden_layers=1)
    checkpoint = open_checkpoint(str(path))
    unknown = check_tensors(decoder_spec(checkpoint.config, 64), checkpoint.open_weights())
    assert len(unknown) == 9 and all(name.startswith("model.layers.1.") for name in unknown)


def test_a_bias_that_the_config_denies_is_an_error(tmp_path: Path) -> None:
    path = tiny_checkpoint("llama_biased", tmp_path)
    edit_config(path, mlp_bias=False)
    checkpoint = open_checkpoint(str(path))
    with pytest.raises(CheckpointError, match=r"mlp\.\w+_proj\.bias is in the checkpoint"):
        check_tensors(decoder_spec(checkpoint.config, 64), checkpoint.open_weights())


@pytest.mark.parametrize(
    ("equal", "head"), [(True, "lm_head"), (False, "lm_head"), (False, "language_model.lm_head")]
)
def test_an_lm_head_that_differs_from_tied_embeddings_wins(
    equal: bool, head: str, tmp_path: Path
) -> None:
    path = tiny_checkpoint("llama3", tmp_path)
    reader = SafetensorsReader(path)
    tensors = {name: np.array(reader.read(name)) for name in reader.names}
    tensors[f"{head}.weight"] = tensors["model.embed_tokens.weight"] + (0.0 if equal else 1.0)
    save_file(tensors, path / "model.safetensors")
    checkpoint = open_checkpoint(str(path))
    weights = checkpoint.open_weights()
    spec = settle_embeddings(decoder_spec(checkpoint.config, 64), weights)
    assert spec.lm_head.name == ("model.embed_tokens" if equal else head)
    assert check_tensors(spec, weights) == ()


# --- no weights at all -----------------------------------------------------------------------


def test_dummy_tensors_depend_on_their_name_alone() -> None:
    tensors = {"a.weight": ("bf16", (4, 8)), "b.weight": ("bf16", (4, 8))}
    first, again = DummyReader(tensors), DummyReader(tensors)
    np.testing.assert_array_equal(first.read("a.weight"), again.read("a.weight"))
    assert (first.read("a.weight") != first.read("b.weight")).any()
    with pytest.raises(CheckpointError, match=r"c\.weight"):
        first.read("c.weight")


@pytest.mark.parametrize("scheme", ["bf16", "fp8", "int8_sq", "int4_awq", "w4a8_awq"])
def test_a_dummy_checkpoint_has_every_tensor_in_its_declared_form(scheme: str) -> None:
    config = json.loads(Path("examples/models/pyllama/config.json").read_text())
    reader, quantization = dummy_checkpoint(decoder_spec(config, 64), SCHEMES[scheme])
    for name, (dtype, shape) in reader.tensors.items():
        if "layers.0." in name or "layers." not in name:
            values = reader.read(name)
            assert values.shape == shape, name
            assert np.isfinite(values.astype(np.float32)).all(), (name, dtype)
    assert (quantization is None) == (scheme == "bf16")
    if quantization is not None:
        assert len(quantization.linears) == 7 * config["num_hidden_layers"]
