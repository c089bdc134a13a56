"""Merges linears that read the same tensor into one linear and views of its columns."""

from collections.abc import Sequence
from functools import partial

import numpy as np

from trtc.builder.passes.base import Rewrite
from trtc.builder.passes.matching import Node, Tensor, dtype_of, input_of, is_fused, merged_site
from trtc.builder.passes.rewriter import Rewriter
from trtc.builder.passes.shard_rules import Part, parts_to_be
from trtc.builder.recipes import Concat
from trtc.plugins.rounding import NUMPY_DTYPES
from trtc.protos.dtypes import DTYPES

_ROWWISE = ("weight", "weight_scale", "weight_zero", "scale_unit", "bias")
"""Inputs with a row an output column."""


_WORD_BYTES = 16
"""GPUs read in words of so many bytes, and each of the merged outputs begins at one. Whoever does
not fill whole words comes last (Jamba's rank of steps beside B and C); there is at most one."""
_WHOLE_COLUMNS = 16
"""cuBLASLt multiplies by 257 columns in 160 us where 264 take 15 (8192 rows of 2048, H200), and
gemm/streamed.cu takes whole sixteens."""


def merge_linears(rewriter: Rewriter, ranks: int = 1) -> bool:
    """Merge q, k and v, gate and up, and whatever else multiplies the same activation.

    Rule: linear(x, w1), linear(x, w2), ... -> Split(linear(x, [w1; w2; ...])), for linears of
    equal attributes, equal input_scale and the same optional inputs, without residuals. Routers are
    merged with the gates of shared experts alone: every rank of a sharded model has them whole. A
    rank's share of each but the last is in whole words of 16 bytes.
    """

    def is_narrow(node: Node) -> bool:
        columns = _columns_of_rank(rewriter, node, ranks)
        return DTYPES[str(node.attrs["out_dtype"])].num_bytes(columns) % _WORD_BYTES != 0

    def takes(group: list[Node], node: Node) -> bool:
        return _alike(rewriter, node, group[0]) and not (
            is_narrow(node) and any(map(is_narrow, group))
        )

    changed = False
    groups: list[list[Node]] = []
    for node in rewriter.fused_nodes("linear"):
        if input_of(node, "residual") is not None or rewriter.is_output(node.outputs[0]):
            continue
        group = next((group for group in groups if takes(group, node)), None)
        if group is None:
            groups.append([node])
        else:
            group.append(node)
    for group in groups:
        if len(group) > 1:
            group.sort(key=is_narrow)
            _merge(rewriter, group)
            changed = True
    return changed


def _columns_of_rank(rewriter: Rewriter, node: Node, ranks: int) -> int:
    if _routes(node):
        return int(node.attrs["N"])
    parts = parts_to_be(rewriter, node.outputs[0]) or (Part(int(node.attrs["N"])),)
    return sum(part.share(ranks) for part in parts)


def _alike(rewriter: Rewriter, left: Node, right: Node) -> bool:
    if left.inputs[0] is not right.inputs[0]:
        return False
    if input_of(left, "row_scale") is not input_of(right, "row_scale"):
        return False
    if _routes(left) != _routes(right):
        return False
    if {**left.attrs, "N": 0} != {**right.attrs, "N": 0}:
        return False
    if any(_columns(left, name) != _columns(right, name) for name in _ROWWISE):
        return False
    return rewriter.same_weight(input_of(left, "input_scale"), input_of(right, "input_scale"))


def _routes(linear: Node) -> bool:
    return any(is_fused(reader, "moe") for reader in linear.outputs[0].outputs)


def _columns(node: Node, name: str) -> list[int] | None:
    """The extents after the first of a rowwise input; None when it is absent."""
    tensor = input_of(node, name)
    return None if tensor is None else list(tensor.shape[1:])


def _merge(rewriter: Rewriter, group: Sequence[Node]) -> None:
    first = group[0]
    site = merged_site([node.name for node in group])
    outputs = [node.outputs[0] for node in group]
    widths = [int(node.attrs["N"]) for node in group]
    spare = -sum(widths) % _WHOLE_COLUMNS if _routes(first) else 0
    if spare:
        widths.append(spare)
        outputs.append(
            rewriter.variable(f"{site}.spare", first.attrs["out_dtype"], outputs[0].shape)
        )
    sizes = np.array(widths, np.int64)
    merged = rewriter.variable(f"{site}.out", first.attrs["out_dtype"], outputs[0].shape)
    rewriter.fused(
        "linear",
        site,
        inputs={
            "x": first.inputs[0],
            "input_scale": input_of(first, "input_scale"),
            "row_scale": input_of(first, "row_scale"),
            **{name: _joined(rewriter, site, name, group, spare) for name in _ROWWISE},
        },
        outputs={"out": merged},
        attributes={**first.attrs, "N": int(sizes.sum())},
    )
    split = rewriter.constant(f"{site}.sizes", sizes, "i64")
    rewriter.node("Split", f"{site}.split", [merged, split], outputs, {"axis": 1})


def _joined(
    rewriter: Rewriter, site: str, name: str, group: Sequence[Node], spare: int
) -> Tensor | None:
    parts = [input_of(node, name) for node in group]
    tensors = [part for part in parts if part is not None]
    if not tensors:
        return None
    if spare:
        dtype = dtype_of(tensors[0])
        zeros = np.zeros((spare, *tensors[0].shape[1:]), NUMPY_DTYPES[dtype])
        tensors.append(rewriter.constant(f"{site}.spare_{name}", zeros, dtype))
    rows = sum(int(tensor.shape[0]) for tensor in tensors)
    values = [rewriter.value(tensor) for tensor in tensors]
    known = [value for value in values if value is not None]
    return rewriter.weight(
        f"{site}.{name}",
        Concat(tuple(rewriter.recipes[tensor.name] for tensor in tensors)),
        dtype_of(tensors[0]),
        [rows, *tensors[0].shape[1:]],
        np.concatenate(known) if len(known) == len(values) else None,
    )


def merge_linears_of(ranks: int) -> Rewrite:
    """The pass for a model that `ranks` ranks share."""
    return Rewrite(
        "merge_linears",
        partial(merge_linears, ranks=ranks),
        requires=frozenset({"share_quantize", "fuse_shared_expert"}),
    )


MERGE_LINEARS = merge_linears_of(1)
