"""Scales of iq4 weights as bytes, where kernels read them so."""

from trtc.builder.passes.base import Rewrite
from trtc.builder.passes.matching import dtype_of, input_of
from trtc.builder.passes.rewriter import Rewriter
from trtc.builder.transforms import ScaleCodes, ScaleUnits


def byte_scales(rewriter: Rewriter) -> bool:
    """Store the scales of iq4 linears and tables as bytes and a unit a row; see plugins/iq4.py.

    Rules:
        linear(x, w iq4, s [N, G] f32)    -> linear(x, w, u8 [N, G], scale_unit [N])
        embedding(ids, t u4, s [V, G] f32) -> embedding(ids, t, u8 [V, G], scale_unit [V])

    No value changes. Experts' scales stay f32; those of E2M1 linears are bytes already.
    """
    linears = [
        (node, "weight_scale")
        for node in rewriter.fused_nodes("linear")
        if node.attrs["weight_dtype"] == "iq4"
    ]
    lookups = [
        (node, "table_scale")
        for node in rewriter.fused_nodes("embedding")
        if node.attrs["weight_dtype"] == "iq4"
    ]
    changed = False
    for node, name in (*linears, *lookups):
        scale = input_of(node, name)
        if scale is None or dtype_of(scale) != "f32":
            continue
        units = rewriter.derived(
            f"{scale.name}.unit", ScaleUnits(), (scale,), "f32", (scale.shape[0],)
        )
        codes = rewriter.derived(
            f"{scale.name}.codes", ScaleCodes(), (scale,), "u8", tuple(scale.shape)
        )
        rewriter.set_input(node, name, codes)
        rewriter.set_input(node, "scale_unit", units)
        changed = True
    return changed


BYTE_SCALES = Rewrite("byte_scales", byte_scales, requires=frozenset({"merge_linears"}))
