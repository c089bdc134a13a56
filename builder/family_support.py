"""The families that trtc builds: parts, targets and schemes of each."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from trtc.builder.checkpoint.dummy import dummy_checkpoint
from trtc.builder.families.features import features
from trtc.builder.families.registry import FAMILIES, decoder_spec
from trtc.builder.graph import GraphRequest, build_graph
from trtc.builder.mixers import check_mixers
from trtc.builder.spec import DecoderSpec
from trtc.builder.targets.registry import parse_target
from trtc.protos.errors import UnsupportedError
from trtc.protos.manifest import Limits
from trtc.quant.scheme import BUILDABLE, SCHEMES

SCHEMES_BUILT = BUILDABLE
TARGETS_SHOWN: Mapping[str, str] = {
    "cpu": "cpu:generic",
    "cuda": "cuda:sm_90",
    "tensorrt": "tensorrt:sm_120",
    "tensorrt-rtx": "tensorrt-rtx:sm_120",
}
"""Kind -> one that has every scheme which the kind has."""
_MAX_SEQ_LEN = 64
_LAYER_NUMBER = re.compile(r"\.\d+\.")
"""In the names of tensors; experts' too, all of which are alike."""
EXAMPLE: Mapping[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "sliding_window": 128,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "block_multiple_of": 128,
    "num_local_experts": 4,
    "n_routed_experts": 16,
    "moe_num_experts": 4,
    "moe_k": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "moe_shared_expert_intermediate_size": 256,
    "mamba_num_heads": 8,
    "full_attn_idxs": [2, 5],
    "hidden_size_per_layer_input": 0,
}
"""config.json of a small model; absent fields have the family's defaults."""


@dataclass(frozen=True)
class FamilyRow:
    """A row of the list."""

    architecture: str
    """In config.json."""
    family: str
    """Name in manifests."""
    features: tuple[str, ...]
    """Of a model with the family's defaults, beside what Llama has."""
    targets: dict[str, tuple[str, ...]]
    """Kind of target -> schemes that it builds the family in."""


def example_spec(architecture: str) -> DecoderSpec:
    """A small model of an architecture, by the defaults of its family."""
    return decoder_spec({**EXAMPLE, "architectures": [architecture]}, _MAX_SEQ_LEN)


def family_rows() -> tuple[FamilyRow, ...]:
    """All families, by architecture."""
    return tuple(_row(example_spec(architecture)) for architecture in sorted(FAMILIES))


def _row(spec: DecoderSpec) -> FamilyRow:
    short = _with_every_kind_of_layer(spec)
    graphs = {name for name in SCHEMES_BUILT if _has_graph(short, name)}
    targets = {
        kind: tuple(name for name in SCHEMES_BUILT if name in graphs and _takes(target, spec, name))
        for kind, target in TARGETS_SHOWN.items()
    }
    built = {kind: schemes for kind, schemes in targets.items() if schemes}
    return FamilyRow(spec.architecture, spec.family, features(spec), built)


def _with_every_kind_of_layer(spec: DecoderSpec) -> DecoderSpec:
    """The model up to the last layer that differs from all before it by more than its number: what
    a scheme cannot hold is among these, and a graph takes its time for each layer."""
    kinds = [_LAYER_NUMBER.sub(".#.", repr(layer)) for layer in spec.layers]
    last = max(kinds.index(kind) for kind in kinds)
    return replace(spec, layers=spec.layers[: last + 1])


def _takes(name: str, spec: DecoderSpec, scheme: str) -> bool:
    target = parse_target(name)
    try:
        check_mixers(spec, target)
        target.check_scheme(SCHEMES[scheme])
    except UnsupportedError:
        return False
    return True


def _has_graph(spec: DecoderSpec, scheme: str) -> bool:
    """Whether the linears can be quantised so."""
    named = SCHEMES[scheme]
    limits = Limits(max_batch_size=1, max_seq_len=_MAX_SEQ_LEN, max_num_tokens=1)
    try:
        reader, quantization = dummy_checkpoint(spec, named)
        request = GraphRequest(named, named.dtype, limits, quantization)
        build_graph(spec, request, reader)
    except UnsupportedError:
        return False
    return True
