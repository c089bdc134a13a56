"""The scratch buffers of expanded_latent_attention's launches."""

from collections.abc import Mapping

from trtc.plugins.gpu.lowering import Site
from trtc.protos.dtypes import DTYPES

WIDE_KEYS, WIDE_VALUES = "wide_keys", "wide_values"
"""[heads, room, head_dim] and [heads, room, value_dim] of the activation type."""
COUNTER = "counter"
"""An i32."""


def wide_bytes(site: Site) -> Mapping[str, int]:
    """Bytes of WIDE_KEYS and WIDE_VALUES."""
    rows = int(site.attributes["num_heads"]) * int(site.attributes["room"])
    element = DTYPES[site.dtypes["q"]].num_bytes(1)
    return {
        WIDE_KEYS: rows * int(site.attributes["head_dim"]) * element,
        WIDE_VALUES: rows * site.axes["value_dim"] * element,
    }


def buffer_types(site: Site) -> Mapping[str, str]:
    return {WIDE_KEYS: site.dtypes["q"], WIDE_VALUES: site.dtypes["q"], COUNTER: "i32"}
