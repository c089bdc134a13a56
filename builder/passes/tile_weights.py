"""4-bit weights of linears and experts in the order of the CUDA kernels."""

from trtc.builder.passes.base import Rewrite
from trtc.builder.passes.matching import Node, Tensor, dtype_of, has_powers, input_of
from trtc.builder.passes.rewriter import Rewriter
from trtc.builder.transforms import PadGroups, Tile
from trtc.plugins.layouts import WEIGHTS
from trtc.plugins.products import E8M0_BIAS
from trtc.plugins.tiles import CHANNELS, fits

_WORD = 4
"""Bytes."""
_TILED = ("i4", "u4", "iq4")
"""Weight types; of linears E2M1 too."""


def tile_weights(rewriter: Rewriter) -> bool:
    """Reorder row-major 4-bit weights, with their scales and zero points; see plugins/tiles.py.

    Rules, where all weights of the node fall into whole tiles:
        linear(x, weight [N, K] i4, u4, iq4 or f4e2m1; row_major)
                                                           -> linear(x, weight [N, K]; tiles)
        moe(x, _, gate_up [E, 2I, H], down [E, H, I]; ...) -> the same, every expert by itself
        embedding(ids, the same weight)                    -> the same

    Types and shapes stay. E2M1 weights of experts and their scales stay row-major, and rows of
    these are padded to whole words, in which kernels load them.
    """
    changed = False
    for op, names in WEIGHTS.items():
        for node in rewriter.fused_nodes(op):
            if _matches(node, names):
                for lookup in _lookups(node):
                    _tile(rewriter, lookup, "table", CHANNELS)
                    _tile(rewriter, lookup, "table_scale", 1)
                    lookup.attrs["layout"] = "tiles"
                for name in names:
                    _tile(rewriter, node, name, CHANNELS)
                    _tile(rewriter, node, f"{name}_scale", 1)
                    _tile(rewriter, node, f"{name}_zero", 1)
                node.attrs["layout"] = "tiles"
                changed = True
            elif op == "moe" and node.attrs["weight_dtype"] == "f4e2m1":
                for name in names:
                    changed |= _pad(rewriter, node, f"{name}_scale")
    return changed


def _matches(node: Node, names: tuple[str, ...]) -> bool:
    tiled = (*_TILED, "f4e2m1") if node.op == "linear" else _TILED
    if node.attrs["weight_dtype"] not in tiled or node.attrs["layout"] != "row_major":
        return False
    shapes = [_given(node, name).shape for name in names]
    return all(fits(shape[-2], shape[-1], node.attrs["group_size"]) for shape in shapes)


def _lookups(node: Node) -> list[Node]:
    """Lookups in the weight of a linear, which is stored once."""
    if node.op != "linear":
        return []
    return [reader for reader in _given(node, "weight").outputs if reader.op == "embedding"]


def _pad(rewriter: Rewriter, node: Node, name: str) -> bool:
    scale = _given(node, name)
    *rows, groups = scale.shape
    missing = -groups % _WORD
    if missing:
        padded = rewriter.derived(
            f"{scale.name}.words",
            PadGroups(groups + missing, E8M0_BIAS if has_powers(node) else 0),
            (scale,),
            dtype_of(scale),
            (*rows, groups + missing),
        )
        rewriter.set_input(node, name, padded)
    return bool(missing)


def _given(node: Node, name: str) -> Tensor:
    tensor = input_of(node, name)
    assert tensor is not None, f"{node.name} has no {name}"
    return tensor


def _tile(rewriter: Rewriter, node: Node, name: str, width: int) -> None:
    tensor = input_of(node, name)
    if tensor is not None:
        tiled = rewriter.derived(
            f"{tensor.name}.tiles", Tile(width), (tensor,), dtype_of(tensor), tensor.shape
        )
        rewriter.set_input(node, name, tiled)


TILE_WEIGHTS = Rewrite("tile_weights", tile_weights, requires=frozenset({"merge_linears"}))
