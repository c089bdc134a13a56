"""Take the plugins of a bundle through TensorRT's ahead-of-time life cycle, with no TensorRT.

    LD_LIBRARY_PATH=<stub libraries> python -m tests.tensorrt.qdp_life BUNDLE [alias]

TensorRT's real Python layer runs; what the library would do (symbols, expression builders, tensor
descriptions) is played here. Prints one JSON document.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tensorrt as trt
import tensorrt.plugin as trtp
from tensorrt_bindings.plugin import _plugin_class, _tensor
from tensorrt_bindings.plugin._lib import QDP_REGISTRY, _TemplatePluginCreator

from trtc.plugins.attention_combine.tensorrt import register as register_attention_combine
from trtc.plugins.attention_split.tensorrt import register as register_attention_split
from trtc.plugins.kv_write.tensorrt import register as register_kv_write
from trtc.plugins.paged_attention.tensorrt import register as register_paged_attention
from trtc.plugins.tensorrt.aot import Kernels
from trtc.protos.bundle import KernelFacts, read_recipe

TYPES = {"f32": trt.float32, "bf16": trt.bfloat16, "f8e4m3": trt.fp8}
SIZES = {"T": 37, "B": 5, "B+1": 6, "P": 9, "num_pages": 50}


class Expression(trt.IDimensionExpr):  # type: ignore[misc]
    """A number that knows how it was made."""

    def __init__(self, value: int, text: str) -> None:
        trt.IDimensionExpr.__init__(self)
        self.value, self.text = value, text

    @classmethod
    def make(cls, value: int, text: str) -> "Expression":
        one: Expression = trt.IDimensionExpr.__new__(cls)
        one.value, one.text = value, text
        return one

    def is_constant(self) -> bool:
        return self.text.isdigit()

    def get_constant_value(self) -> int:
        return self.value


class Builder:
    """The expression builder that TensorRT would hand over."""

    def constant(self, value: int) -> Expression:
        return Expression.make(value, str(value))

    def operation(self, kind: Any, left: Expression, right: Expression) -> Expression:
        operations = {
            trt.DimensionOperation.SUM: ("+", left.value + right.value),
            trt.DimensionOperation.PROD: ("*", left.value * right.value),
            trt.DimensionOperation.SUB: ("-", left.value - right.value),
            trt.DimensionOperation.FLOOR_DIV: ("//", left.value // max(1, right.value)),
            trt.DimensionOperation.CEIL_DIV: ("ceil/", -(-left.value // max(1, right.value))),
            trt.DimensionOperation.MAX: ("max", max(left.value, right.value)),
            trt.DimensionOperation.MIN: ("min", min(left.value, right.value)),
        }
        sign, value = operations[kind]
        return Expression.make(value, f"({left.text} {sign} {right.text})")


class Scalars(list[Any]):
    nbSymExprs = 0

    def __setitem__(self, index: Any, value: Any) -> None:
        self.extend([None] * (index + 1 - len(self)))
        super().__setitem__(index, value)


class Captured(_tensor.SymExprImpl):  # type: ignore[misc]
    """What is handed to the library and cannot be read back from it."""

    def __init__(self, expr: Any) -> None:
        super().__init__(expr)
        self.__dict__["made_of"] = expr._expr.text


class Params:
    """What TensorRT reads the launch from."""

    grid_x: Any
    grid_y: Any
    grid_z: Any
    block_x: Any
    shared_mem: Any


def text(symbol: Any) -> str:
    """How a symbolic integer was made of axes and numbers."""
    return str(symbol.made_of)


def shape(axes: tuple[int | str, ...]) -> list[Expression]:
    return [Expression.make(SIZES[one] if isinstance(one, str) else one, str(one)) for one in axes]


def inputs_of(kernel: KernelFacts, page_size: int) -> list[tuple[Any, tuple[int | str, ...]]]:
    """(type, shape) of every input of the node."""
    if kernel.op == "attention_combine":
        rows = output_axes(kernel, page_size)[0]
        partial, stats = split_axes(kernel)
        return [
            (TYPES[kernel.dtypes["rows"]], rows),
            (trt.float32, partial),
            (trt.float32, stats),
            (trt.int32, ("B+1",)),
            (trt.int32, ("B",)),
        ]
    a = kernel.attributes
    heads, width = int(a["num_kv_heads"]), int(a["head_dim"])
    pool = (TYPES[kernel.dtypes["pool"]], ("num_pages", 2, page_size, heads, width))
    scalar = (trt.float32, ())
    if kernel.op == "kv_write":
        row = (TYPES[kernel.dtypes["k"]], ("T", heads * width))
        return [row, row, pool, (trt.int32, ("T",)), scalar, scalar]
    q = (TYPES[kernel.dtypes["q"]], ("T", int(a["num_heads"]) * width))
    ints: list[tuple[Any, tuple[int | str, ...]]] = [
        (trt.int32, ("B+1",)),
        (trt.int32, ("B",)),
        (trt.int32, ("B", "P")),
    ]
    return [q, pool, *ints, scalar, scalar]


def live(kernel: KernelFacts, page_size: int) -> dict[str, Any]:
    """Create the plugin as the ONNX parser would, and ask it all that the builder asks."""
    definition = QDP_REGISTRY[f"trtc::{kernel.op}"]
    types = {name: (True, kind) for name, kind in definition.input_attrs.items()}
    creator = _TemplatePluginCreator(kernel.op, "trtc", types)
    fields = [field(name, kernel.attributes[name]) for name in definition.input_attrs]
    plugin = creator.create_plugin(
        kernel.op,
        "trtc",
        trt.PluginFieldCollection(fields),
        trt.TensorRTPhase.BUILD,
        trt.QuickPluginCreationRequest.STRICT_AOT,
    )
    given = inputs_of(kernel, page_size)
    outputs = plugin.get_output_data_types([one for one, _ in given], [len(s) for _, s in given])
    shapes = plugin.get_output_shapes([shape(s) for _, s in given], [], Builder())
    made = [desc(*one) for one in zip(outputs, output_axes(kernel, page_size), strict=True)]
    descs = [desc(*one) for one in given] + made
    combinations = plugin.get_supported_format_combinations(descs, len(given))
    plugin.configure_plugin(descs[: len(given)], made)
    choose(plugin, descs)
    tactics = plugin.get_valid_tactics()
    plugin.set_tactic(kernel.tactic)
    params, scalars = Params(), Scalars()
    plugin.get_launch_params(
        [shape(s) for _, s in given], descs, len(given), params, scalars, Builder()
    )
    entry, code = plugin.get_kernel([d.desc for d in descs[: len(given)]], [d.desc for d in made])
    return {
        "op": kernel.op,
        "tactic": kernel.tactic,
        "aliased": plugin.get_aliased_input(0),
        "outputs": [str(one) for one in outputs],
        "output_shapes": [[one.text for one in each] for each in shapes],
        "output_sizes": [[one.value for one in each] for each in shapes],
        "formats": [str(one.type) for one in combinations],
        "tactics": tactics,
        "grid": [text(params.grid_x), text(params.grid_y), text(params.grid_z)],
        "block": text(params.block_x),
        "shared": text(params.shared_mem),
        "scalars": [text(one) for one in scalars],
        "entry": entry,
        "code_bytes": len(code),
    }


def output_axes(kernel: KernelFacts, page_size: int) -> list[tuple[int | str, ...]]:
    """The shape of every output."""
    a = kernel.attributes
    if kernel.op == "kv_write":
        return [("num_pages", 2, page_size, int(a["num_kv_heads"]), int(a["head_dim"]))]
    rows = ("T", int(a["num_heads"]) * int(a["head_dim"]))
    return [rows, *split_axes(kernel)] if kernel.op == "attention_split" else [rows]


def split_axes(kernel: KernelFacts) -> list[tuple[int | str, ...]]:
    """The shapes of partial and stats."""
    a = kernel.attributes
    width = int(a["splits"]) * int(a["num_heads"])
    return [("B", width * int(a["head_dim"])), ("B", 2 * width)]


def field(name: str, value: int | float | str) -> Any:
    if isinstance(value, str):
        return trt.PluginField(name, value.encode() + b"\0", trt.PluginFieldType.CHAR)
    if isinstance(value, float):
        return trt.PluginField(name, np.asarray([value], np.float32), trt.PluginFieldType.FLOAT32)
    return trt.PluginField(name, np.asarray([value], np.int32), trt.PluginFieldType.INT32)


def desc(dtype: Any, axes: tuple[int | str, ...]) -> Any:
    sizes = [SIZES[one] if isinstance(one, str) else one for one in axes]
    dynamic = trt.DynamicPluginTensorDesc()
    inner = trt.PluginTensorDesc()
    inner.dims, inner.type, inner.format = trt.Dims(sizes), dtype, trt.TensorFormat.LINEAR
    dynamic.desc = inner
    dynamic.min = dynamic.opt = dynamic.max = trt.Dims(sizes)
    return dynamic


def choose(plugin: Any, descs: list[Any]) -> None:
    """The format combination that the builder settles on: the only one."""
    (plugin.curr_comb,) = plugin.supported_combs


def main(bundle: Path, *, alias_pools: bool) -> None:
    recipe = read_recipe(bundle)
    kernels = Kernels(recipe.kernels, lambda name: (bundle / name).read_bytes())
    register_kv_write(trtp, kernels, alias_pools=alias_pools, lazy=True)
    register_paged_attention(trtp, kernels, lazy=True)
    register_attention_split(trtp, kernels, lazy=True)
    register_attention_combine(trtp, kernels, lazy=True)
    # The library's own container cannot be made without it.
    _tensor.SymExprImpl = Captured
    _plugin_class.trt.DimsExprs = lambda length: [None] * length
    lives = [live(kernel, recipe.pool.page_size) for kernel in recipe.kernels]
    sys.stdout.write(json.dumps(lives))


if __name__ == "__main__":
    main(Path(sys.argv[1]), alias_pools="alias" in sys.argv[2:])
