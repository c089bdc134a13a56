"""Joins neighbouring views of one product into one view."""

import numpy as np

from trtc.builder.passes.base import Rewrite
from trtc.builder.passes.matching import Node, Tensor, producer
from trtc.builder.passes.rewriter import Rewriter
from trtc.protos.errors import UnsupportedError


def join_columns(rewriter: Rewriter) -> bool:
    """An operator reads q, k and v as one tensor, and the checkpoint has them apart.

    Rule: Concat(neighbouring outputs of Split(x)) -> an output of Split(x), or x if they are all of
    it.

    Raises:
        UnsupportedError: they are not of one product, since their quantisation differs.
    """
    changed = False
    for concat in rewriter.nodes("Concat"):
        parts = list(concat.inputs)
        split = producer(parts[0], "Split")
        at = None if split is None else _place(parts, split)
        if split is None or at is None:
            raise UnsupportedError(
                "its parts are read as one product, and their quantisation differs",
                field=concat.name,
                remedy="Quantise q, k and v of a layer alike",
            )
        _join(rewriter, concat, split, at)
        changed = True
    return changed


def _place(parts: list[Tensor], split: Node) -> int | None:
    """Where in a Split's outputs the parts begin, if nothing else reads them."""
    views = list(split.outputs)
    at = next(i for i, view in enumerate(views) if view is parts[0])
    neighbours = views[at : at + len(parts)]
    if list(map(id, neighbours)) != list(map(id, parts)):
        return None
    return at if all(len(part.outputs) == 1 for part in parts) else None


def _join(rewriter: Rewriter, concat: Node, split: Node, at: int) -> None:
    number, joined = len(concat.inputs), concat.outputs[0]
    views, source = list(split.outputs), split.inputs[0]
    if number == len(views):
        rewriter.replace_uses(joined, source)
        return
    sizes = rewriter.value(split.inputs[1])
    assert sizes is not None, f"{split.name} has no sizes"
    widths = [*sizes[:at], sizes[at : at + number].sum(), *sizes[at + number :]]
    given = rewriter.constant(f"{split.name}.joined_sizes", np.array(widths, np.int64), "i64")
    rewriter.node(
        "Split",
        f"{split.name}.joined",
        [source, given],
        [*views[:at], joined, *views[at + number :]],
        {"axis": 1},
    )


JOIN_COLUMNS = Rewrite("join_columns", join_columns, requires=frozenset({"merge_linears"}))
