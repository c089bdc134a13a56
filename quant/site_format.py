"""Formats of single sites: what a recipe may give each, as a literal table of frozen records.

A site is the linears that an engine has as one matrix, which therefore have one format: q, k and v,
gate and up, all experts of a layer; any other linear by itself.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from trtc.plugins.iq4 import GROUPS

_SITES = (
    # Experts of a layer are one operator, so their weights have one type.
    (re.compile(r"^(.*\.experts)\.\d+\.[^.]+$"), r"\1"),
    # These share an input, which AWQ and SmoothQuant scale for all of them.
    (re.compile(r"^(.*)\.(?:q|k|v)_proj$"), r"\1.qkv_proj"),
    (re.compile(r"^(.*)\.(?:gate|up)_proj$"), r"\1.gate_up_proj"),
)
_SCALE_BITS = 16


def site_of(linear: str) -> str:
    """The name of a linear's site: `model.layers.0.self_attn.qkv_proj`.

    Args:
        linear: its name in Transformers' model.
    """
    for pattern, site in _SITES:
        if pattern.match(linear):
            return pattern.sub(site, linear)
    return linear


@dataclass(frozen=True)
class SiteFormat:
    """How weights are stored. They are multiplied with activations in bf16."""

    name: str
    weight: Literal["bf16", "f8e4m3", "i8", "i6", "i4", "iq4"]
    group_size: int | None = None
    """Input channels that share a scale; None: all of an output channel."""

    @property
    def is_quantized(self) -> bool:
        return self.weight != "bf16"

    @property
    def code_bits(self) -> int:
        """Of a weight, without its scale."""
        return {"bf16": 16, "f8e4m3": 8, "i8": 8, "i6": 6, "i4": 4, "iq4": 4}[self.weight]

    @property
    def is_gptq(self) -> bool:
        """Whether weights are rounded by GPTQ or GPTAQ, else to nearest."""
        return self.weight in ("i4", "iq4", "i6")

    def num_bits(self, out_features: int, in_features: int) -> int:
        """Of a weight [out_features, in_features] and its scales, as checkpoints store them."""
        codes = out_features * in_features * self.code_bits
        if not self.is_quantized:
            return codes
        groups = in_features // self.group_size if self.group_size else 1
        return codes + out_features * groups * (8 if self.weight == "iq4" else _SCALE_BITS)

    def why_not(self, out_features: int, in_features: int) -> str:
        """Why it cannot hold a weight of this size; "" when it can."""
        if self.group_size and in_features % self.group_size:
            return f"has {in_features} input features, no multiple of {self.group_size}"
        if self.code_bits == 4 and out_features % 2:
            return f"has {out_features} output features; 4-bit rows are stored in pairs"
        return ""


BF16 = SiteFormat("bf16", "bf16")
FP8 = SiteFormat("fp8", "f8e4m3")
INT8 = SiteFormat("int8", "i8")
FORMATS: dict[str, SiteFormat] = {
    one.name: one
    for one in (
        SiteFormat("int4_g128", "i4", 128),
        SiteFormat("int4_g64", "i4", 64),
        SiteFormat("iq4", "iq4", GROUPS[0]),
        SiteFormat("int4_g32", "i4", 32),
        SiteFormat("iq4_g16", "iq4", GROUPS[1]),
        SiteFormat("int6_g128", "i6", 128),
        SiteFormat("int8_g128", "i8", 128),
        INT8,
        FP8,
        BF16,
    )
}
"""By name."""


TABLE_FORMATS: dict[str, SiteFormat] = {
    name: FORMATS[name] for name in ("iq4", "iq4_g16", "int6_g128", "int8_g128", "bf16")
}
"""Of the lm_head and of the table of embeddings, narrow ones first."""
LM_HEAD, EMBEDDING = "lm_head", "embed_tokens"
"""Their sites, whatever a model calls them. Where embeddings are tied, the table is both, and there
is no lm_head."""
TABLES = (LM_HEAD, EMBEDDING)


@dataclass(frozen=True)
class TableFormats:
    """Formats of the lm_head and of the table of embeddings; None: as the target has them."""

    lm_head: SiteFormat | None = None
    embedding: SiteFormat | None = None
    """Of a table that is the lm_head's weight as well: the same."""

    @property
    def names(self) -> dict[str, str]:
        """By site, of those that are given."""
        given = {LM_HEAD: self.lm_head, EMBEDDING: self.embedding}
        return {site: one.name for site, one in given.items() if one is not None}

    def tied(self) -> "TableFormats":
        """Of a model whose table is both."""
        one = self.embedding or self.lm_head
        return TableFormats(one, one)


DEFAULT_TABLES = TableFormats()
"""Nothing is said of either."""


def grouped(weight: str, group_size: int) -> SiteFormat:
    """Weights of a type that GPTQ rounds, in groups; of int4 in groups of any size."""
    alike = (
        one for one in FORMATS.values() if (one.weight, one.group_size) == (weight, group_size)
    )
    return next(alike, SiteFormat(f"int4_g{group_size}", "i4", group_size))


def narrowest(formats: Iterable[SiteFormat]) -> SiteFormat:
    """The one with the fewest bits a weight; of equal ones, the first."""
    return min(formats, key=lambda one: one.code_bits)
