"""The declarations: attributes, axes, output types, and that the registry is light."""

import subprocess
import sys

import pytest

from trtc.plugins.op import TensorType, axis_extent
from trtc.plugins.registry import REGISTRY
from trtc.protos.dtypes import DTYPES

ATTENTION = REGISTRY["paged_attention"]
HEADS: dict[str, int | float | str] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}


def attention_inputs(tokens: int | str = "T", sequences: int | str = "B") -> dict[str, TensorType]:
    borders = sequences + 1 if isinstance(sequences, int) else f"{sequences}+1"
    return {
        "q": TensorType("bf16", (tokens, 64)),
        "pool": TensorType("f8e4m3", ("num_pages", 2, 32, 2, 16)),
        "query_start": TensorType("i32", (borders,)),
        "context_lens": TensorType("i32", (sequences,)),
        "page_table": TensorType("i32", (sequences, "P")),
    }


@pytest.mark.parametrize("op", REGISTRY.values(), ids=REGISTRY.keys())
def test_declarations_are_complete(op):
    names = [parameter.name for parameter in op.parameters]
    assert len(set(names)) == len(names)
    attributes = {attribute.name: attribute for attribute in op.attributes}
    for parameter in op.parameters:
        assert set(parameter.dtypes) <= set(DTYPES)
    for parameter in op.outputs:
        source = op.in_place.get(parameter.name) or parameter.dtype_from
        assert source in names or source in attributes or len(parameter.dtypes) == 1
        if source in attributes:
            assert set(attributes[source].choices) <= set(parameter.dtypes)
    for attribute in op.attributes:
        assert (attribute.kind == "enum") == bool(attribute.choices) == bool(attribute.cpp_enum)
    for output, source in op.in_place.items():
        assert {output, source} <= set(names)
    assert set(op.tolerances) == set(op.outputs[0].dtypes)


def test_axes_stay_symbolic_where_the_step_decides():
    axes = ATTENTION.bind_axes(
        attention_inputs(), HEADS | {"scale": 1.0, "out_dtype": "bf16", "window": 3}
    )
    assert {name: axes[name] for name in ("M", "B", "P", "num_pages")} == {
        "M": "T",
        "B": "B",
        "P": "P",
        "num_pages": "num_pages",
    }
    assert axes["page_size"] == 32
    assert axes["window"] == 3


def test_numbers_bind_through_sums():
    inputs = attention_inputs(tokens=9, sequences=3)
    axes = ATTENTION.bind_axes(inputs, HEADS | {"scale": 1.0, "out_dtype": "bf16"})
    assert (axes["M"], axes["B"]) == (9, 3)


def test_outputs_follow_inputs_and_attributes():
    inferred = ATTENTION.infer_outputs(
        attention_inputs(), HEADS | {"scale": 1.0, "out_dtype": "i8"}
    )
    assert inferred == {"out": TensorType("i8", ("T", 64))}
    norm = REGISTRY["rms_norm"].infer_outputs(
        {"x": TensorType("bf16", ("T", 8)), "weight": TensorType("f32", (8,))},
        {"eps": 1e-6, "out_dtype": "f8e4m3"},
    )
    assert norm["out"] == TensorType("f8e4m3", ("T", 8))
    assert norm["total"] == TensorType("bf16", ("T", 8))


def test_in_place_outputs_are_of_their_inputs_type():
    op = REGISTRY["kv_write"]
    pool = TensorType("f8e4m3", ("num_pages", 2, 8, 2, 16))
    rows = TensorType("bf16", ("T", 32))
    inputs = {"k": rows, "v": rows, "pool": pool, "slots": TensorType("i32", ("T",))}
    assert op.infer_outputs(inputs, {"num_kv_heads": 2, "head_dim": 16}) == {"pool_out": pool}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": TensorType("f8e4m3", ("T", 64))}, "q is f8e4m3"),
        ({"q": TensorType("bf16", ("T", 60))}, "60 along 'num_heads\\*head_dim' where 64"),
        ({"q": TensorType("bf16", (1, "T", 64))}, "q has shape"),
        ({"q": None}, "q is missing"),
        ({"k": TensorType("bf16", ("T", 64))}, "no input k"),
    ],
)
def test_contradicting_inputs_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        ATTENTION.bind_axes(
            attention_inputs() | change, HEADS | {"scale": 1.0, "out_dtype": "bf16"}
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": "big"}, "'big', not float"),
        ({"num_heads": 2.5}, "2.5, not int"),
        ({"out_dtype": "f16"}, "not one of f32, bf16"),
        ({"sclae": 1.0}, "no attribute sclae"),
        ({"scale": None}, "must be given"),
    ],
)
def test_wrong_attributes_are_refused(change, message):
    given = HEADS | {"scale": 1.0, "out_dtype": "bf16"} | change
    with pytest.raises(ValueError, match=message):
        ATTENTION.complete_attributes(given)


def test_defaults_fill_in_declared_order():
    complete = ATTENTION.complete_attributes({**HEADS, "out_dtype": "i8", "scale": 1})
    assert list(complete) == [attribute.name for attribute in ATTENTION.attributes]
    assert complete["window"] == 0
    assert isinstance(complete["scale"], float)


@pytest.mark.parametrize(
    ("axis", "extent"),
    [("2*I", 12), ("I", 6), ("B+1", "B+1"), ("I+1", 7), ("B*I", "6*B"), ("5", 5)],
)
def test_axis_extents(axis, extent):
    assert axis_extent(axis, {"I": 6, "B": "B"}) == extent


def test_registry_imports_neither_onnx_nor_torch():
    code = (
        "import sys; import trtc.plugins.registry; "
        "sys.exit(bool({'onnx', 'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
