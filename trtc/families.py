"""The types of `trtc build --family FILE.py`, for code that has such a function:
docs/families.md."""

from trtc.builder.families.config import Config
from trtc.builder.families.dense import Dense, dense
from trtc.builder.families.rope import rope_spec
from trtc.builder.spec import (
    NO_ROPE,
    AttentionSpec,
    BranchNorms,
    ChoiceBias,
    DecoderSpec,
    DenseMlpSpec,
    GatedDeltaSpec,
    GroupedRows,
    Interleaved,
    LatentAttentionSpec,
    LayerInputSpec,
    LayerInputsSpec,
    LayerSpec,
    LinearSpec,
    Mamba2Spec,
    MoeMlpSpec,
    NormSpec,
    OfExperts,
    QueryScale,
    RopeSpec,
    RouterSpec,
    ShortConvSpec,
)

__all__ = [
    "NO_ROPE",
    "AttentionSpec",
    "BranchNorms",
    "ChoiceBias",
    "Config",
    "DecoderSpec",
    "Dense",
    "DenseMlpSpec",
    "GatedDeltaSpec",
    "GroupedRows",
    "Interleaved",
    "LatentAttentionSpec",
    "LayerInputSpec",
    "LayerInputsSpec",
    "LayerSpec",
    "LinearSpec",
    "Mamba2Spec",
    "MoeMlpSpec",
    "NormSpec",
    "OfExperts",
    "QueryScale",
    "RopeSpec",
    "RouterSpec",
    "ShortConvSpec",
    "dense",
    "rope_spec",
]
