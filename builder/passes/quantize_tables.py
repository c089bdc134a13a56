"""Narrow tables: an lm_head and a table of embeddings in 8, 6 or 4 bits."""

from dataclasses import dataclass

from trtc.builder.module import Module
from trtc.builder.passes.base import rewritten
from trtc.builder.passes.matching import Node, Tensor, dtype_of, input_of
from trtc.builder.passes.rewriter import Rewriter
from trtc.builder.transforms import GroupCodes, GroupScales, SearchedCodes, SearchedScales
from trtc.quant.site_format import SiteFormat, TableFormats


@dataclass(frozen=True)
class QuantizeTables:
    """Store the lm_head and the table of embeddings in formats of their own.

    Rules, for the linear that gives the graph's logits and for lookups, of bf16 weights, in groups
    of G = group_size, the format's:
        linear(x, weight [N, K])   -> linear(x, codes, weight_scale [N, K / G]; group_size)
        embedding(ids, table)      -> embedding(ids, codes, table_scale; group_size)
    A table that is the lm_head's weight as well follows it, and is stored once.

    This rounds weights that the source graph has in bf16; the accuracy report counts it.
    """

    formats: TableFormats
    name: str = "quantize_tables"
    requires: frozenset[str] = frozenset({"lower_linears", "lower_embedding"})

    def __call__(self, module: Module) -> tuple[Module, bool]:
        return rewritten(self, module, Rewriter(module))

    def apply(self, rewriter: Rewriter) -> bool:
        return self._narrow_head(rewriter) | self._narrow_lookups(rewriter)

    def _narrow_head(self, rewriter: Rewriter) -> bool:
        to, changed = self.formats.lm_head, False
        if to is None or not to.is_quantized:
            return False
        for node in rewriter.fused_nodes("linear"):
            if rewriter.is_output(node.outputs[0]) and node.attrs["weight_dtype"] == "bf16":
                weight = _weight(node, "weight")
                codes, scales = _narrowed(rewriter, weight, to)
                for lookup in rewriter.fused_nodes("embedding"):
                    if _weight(lookup, "table").name == weight.name:
                        _look_up(rewriter, lookup, codes, scales, to)
                rewriter.set_input(node, "weight_scale", scales)
                rewriter.set_input(node, "weight", codes)
                node.attrs |= {"weight_dtype": to.weight, "group_size": to.group_size}
                changed = True
        return changed

    def _narrow_lookups(self, rewriter: Rewriter) -> bool:
        to, changed = self.formats.embedding, False
        if to is None or not to.is_quantized:
            return False
        for node in rewriter.fused_nodes("embedding"):
            table = _weight(node, "table")
            if dtype_of(table) == "bf16":
                _look_up(rewriter, node, *_narrowed(rewriter, table, to), to)
                changed = True
        return changed


def _weight(node: Node, name: str) -> Tensor:
    weight = input_of(node, name)
    assert weight is not None, f"{node.name} has no {name}"
    return weight


def _narrowed(rewriter: Rewriter, weight: Tensor, to: SiteFormat) -> tuple[Tensor, Tensor]:
    """Codes and scales of a weight, each of which has one name."""
    group = to.group_size
    assert group is not None, f"tables are quantised in groups, {to.name} has none"
    rows, depth = weight.shape
    shape = (rows, -(-depth // group))
    is_searched = to.weight != "i8"
    of_codes = SearchedCodes(to) if is_searched else GroupCodes(group)
    of_scales = SearchedScales(to) if is_searched else GroupScales(group)
    dtype = "u4" if to.weight == "iq4" else "i8"
    codes = rewriter.derived(f"{weight.name}.{to.weight}", of_codes, (weight,), dtype, weight.shape)
    scales = rewriter.derived(f"{weight.name}.scale", of_scales, (weight,), "f32", shape)
    return codes, scales


def _look_up(rewriter: Rewriter, node: Node, codes: Tensor, scales: Tensor, to: SiteFormat) -> None:
    rewriter.set_input(node, "table_scale", scales)
    rewriter.set_input(node, "table", codes)
    node.attrs |= {"weight_dtype": to.weight, "group_size": to.group_size}
