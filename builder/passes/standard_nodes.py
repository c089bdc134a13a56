"""Standard ONNX nodes in the place of one of trtc's."""

from collections.abc import Sequence

import numpy as np

from trtc.builder.graph_writer import onnx_type
from trtc.builder.passes.matching import Tensor, dtype_of
from trtc.builder.passes.rewriter import Rewriter

Extents = Sequence[int | str]


class StandardNodes:
    """Adds nodes with one output each; their names begin with `site`."""

    def __init__(self, rewriter: Rewriter, site: str) -> None:
        self.rewriter = rewriter
        self.site = site

    def make(
        self,
        op: str,
        name: str,
        inputs: Sequence[Tensor],
        dtype: str,
        shape: Extents,
        **attributes: int | str | list[int],
    ) -> Tensor:
        full = f"{self.site}.{name}"
        output = self.rewriter.variable(f"{full}.out", dtype, shape)
        self.rewriter.node(op, full, inputs, [output], attributes)
        return output

    def cast(self, name: str, x: Tensor, dtype: str) -> Tensor:
        """x itself when it has that type already."""
        if dtype_of(x) == dtype:
            return x
        return self.make("Cast", name, [x], dtype, list(x.shape), to=onnx_type(dtype))

    def reshape(self, name: str, x: Tensor, shape: Extents) -> Tensor:
        """The first axis stays as it is; `shape` has numbers after it."""
        sizes = np.array([0, *shape[1:]], np.int64)
        target = self.rewriter.constant(f"{self.site}.{name}.shape", sizes, "i64")
        return self.make("Reshape", name, [x, target], dtype_of(x), shape)

    def top(self, name: str, x: Tensor, shape: Extents) -> tuple[Tensor, Tensor]:
        """The largest along the last axis, whose extent `shape` has, and their indices i64; of
        equal ones the first."""
        full = f"{self.site}.{name}"
        count = self.rewriter.constant(f"{full}.k", np.array([shape[-1]], np.int64), "i64")
        values = self.rewriter.variable(f"{full}.values", dtype_of(x), shape)
        indices = self.rewriter.variable(f"{full}.out", "i64", shape)
        self.rewriter.node("TopK", full, [x, count], [values, indices], {"axis": len(shape) - 1})
        return values, indices

    def axes(self, axis: int) -> Tensor:
        return self.rewriter.constant(f"experts.axis_{axis}", np.array([axis], np.int64), "i64")

    def number(self, name: str, value: float) -> Tensor:
        """[1] f32."""
        return self.rewriter.constant(f"{self.site}.{name}", np.asarray([value], np.float32), "f32")
