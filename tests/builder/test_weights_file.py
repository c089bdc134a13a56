"""weights.safetensors: valid for the format's own library, aligned for the kernels."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import onnx
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from trtc.builder.memory import align
from trtc.builder.recipes import Constant
from trtc.builder.weights_file import header, with_external_weights, write_weights
from trtc.protos.dtypes import DTYPES, DTypeName
from trtc.protos.errors import InvariantError, OutputError
from trtc.protos.plan import Fill, Weight

VALUES = {
    "f": np.arange(6, dtype=np.float32).reshape(2, 3),
    "scalar": np.float32(2.5) * np.ones((), np.float32),
    "b": np.arange(5).astype(ml_dtypes.bfloat16),
    "e4m3": np.array([1, -2, 448], ml_dtypes.float8_e4m3fn),
    "bytes": np.arange(130, dtype=np.uint8),
    "nibbles": np.array([[-8, 7, 3], [1, 0, -1]], ml_dtypes.int4),
}
_NAMES: dict[str, DTypeName] = {
    "float32": "f32",
    "bfloat16": "bf16",
    "float8_e4m3fn": "f8e4m3",
    "uint8": "u8",
    "int4": "i4",
}


def layout(shapes: dict[str, tuple[DTypeName, tuple[int, ...]]]) -> list[Weight]:
    weights, end = [], 0
    for name, (dtype, shape) in shapes.items():
        size = DTYPES[dtype].num_bytes(int(np.prod(shape)))
        weights.append(
            Weight(
                name=name,
                dtype=dtype,
                shape=shape,
                layout="row_major",
                offset=end,
                bytes=size,
                fill=Fill(element=dtype),
            )
        )
        end = align(end + size)
    return weights


WEIGHTS = layout({name: (_NAMES[str(v.dtype)], v.shape) for name, v in VALUES.items()})
RECIPES = {name: Constant(value) for name, value in VALUES.items()}


def write(path: Path) -> None:
    write_weights([path], WEIGHTS, RECIPES, reader=None, progress=lambda message: None)  # type: ignore[arg-type]


def test_the_safetensors_library_reads_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    write(path)
    found = safetensors.torch.load_file(path)
    for name in ("f", "scalar", "b", "e4m3", "bytes"):
        stored = found[name].reshape(-1).view(torch.uint8).numpy().tobytes()
        assert stored == VALUES[name].tobytes(), name
        assert tuple(found[name].shape) == VALUES[name].shape
    assert found["nibbles"].tolist() == [0x78, 0x13, 0xF0]


def test_every_tensor_is_aligned_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    write(path)
    content = path.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    assert begin % 64 == 0 and len(content) % 64 == 0
    for weight in WEIGHTS[:5]:
        offset = begin + weight.offset
        assert offset % 64 == 0
        assert content[offset : offset + weight.bytes] == VALUES[weight.name].tobytes()


@given(st.lists(st.integers(1, 200), min_size=1, max_size=12))
def test_any_sizes_make_a_valid_header(sizes: list[int]) -> None:
    weights = layout({f"w{i}": ("u8", (size,)) for i, size in enumerate(sizes)})
    head = header(weights)
    body = bytes(align(weights[-1].offset + weights[-1].bytes))
    loaded = safetensors.numpy.load(head + body)
    assert {name for name in loaded if name.startswith("w")} == {w.name for w in weights}


def test_metadata_names_no_path(tmp_path: Path) -> None:
    write(tmp_path / "w.safetensors")
    assert str(tmp_path).encode() not in (tmp_path / "w.safetensors").read_bytes()


def test_onnx_finds_the_weights_in_the_file(tmp_path: Path) -> None:
    write(tmp_path / "weights.safetensors")
    inline = onnx.helper.make_tensor("sizes", 7, [2], [1, 2])
    tensors = [onnx.TensorProto(name="f", data_type=1, dims=[2, 3]), inline]
    tensors.append(onnx.helper.make_tensor("unused", 1, [1], [0.0]))
    node = onnx.helper.make_node("Concat", ["f", "sizes"], ["y"])
    model = onnx.helper.make_model(onnx.helper.make_graph([node], "g", [], [], tensors))
    onnx.save_model(with_external_weights(model, WEIGHTS), str(tmp_path / "graph.onnx"))
    found = {t.name: t for t in onnx.load(str(tmp_path / "graph.onnx")).graph.initializer}
    assert set(found) == {"f", "sizes"}
    np.testing.assert_array_equal(onnx.numpy_helper.to_array(found["f"]), VALUES["f"])
    assert [t.name for t in model.graph.initializer] == ["f", "sizes", "unused"]


def test_a_recipe_that_breaks_its_promise_is_named(tmp_path: Path) -> None:
    recipes = {**RECIPES, "b": Constant(np.zeros(4, np.float32))}
    with pytest.raises(InvariantError, match=r"b: its recipe gave float32\[4\]"):
        write_weights([tmp_path / "w"], WEIGHTS, recipes, None, lambda message: None)  # type: ignore[arg-type]


def test_a_disk_that_is_too_small_is_refused_before_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    with pytest.raises(OutputError, match=r"disk has 0\.00 GB free"):
        write(tmp_path / "w")
    assert not (tmp_path / "w").exists()
