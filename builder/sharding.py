"""Checks, before any work, that a model can be sharded over a number of ranks."""

from collections.abc import Iterator, Mapping

from trtc.builder.spec import (
    DecoderSpec,
    DenseMlpSpec,
    GatedDeltaSpec,
    LayerSpec,
    LinearSpec,
    Mamba1Spec,
    Mamba2Spec,
    MoeMlpSpec,
    ShortConvSpec,
)
from trtc.protos.errors import RequestError
from trtc.quant.scheme import CheckpointQuantization, QuantizedLinear, Scheme


def check_sharding(
    spec: DecoderSpec,
    scheme: Scheme,
    quantization: CheckpointQuantization | None,
    ranks: int,
    *,
    ep: bool = False,
) -> None:
    """Ranks must have as many heads, channels, words, groups of scales and blocks of rotations as
    each other; one alone may have a last group that is shorter.

    Args:
        ep: whether ranks have whole experts, as many each.

    Raises:
        RequestError: something does not divide; the remedy is the most ranks that do. Or experts
            are to be spread, and there are none.
    """
    if ep and not spec.mixtures:
        raise RequestError(
            f"{spec.architecture} has no routed experts", field="--ep", remedy="Leave it out"
        )
    problem = _problem(spec, scheme, quantization, ranks, ep) if ranks > 1 else ""
    if not problem:
        return
    fewer = ranks
    while fewer > 1 and _problem(spec, scheme, quantization, fewer, ep):
        fewer //= 2
    raise RequestError(
        f"{problem} cannot be shared by {ranks} ranks",
        field="--tp",
        remedy=f"Use {fewer}" if fewer > 1 else "Leave it out",
    )


def _problem(
    spec: DecoderSpec,
    scheme: Scheme,
    quantization: CheckpointQuantization | None,
    ranks: int,
    ep: bool,
) -> str:
    """The first extent that is not divisible; "": all are."""
    linears = None if quantization is None else quantization.linears
    for extent, what in _extents(spec, ep):
        if extent % ranks:
            return f"{what}, {extent},"
    for _, attention in spec.attentions:
        heads = attention.num_kv_heads  # with fewer than ranks, several ranks have the same
        if heads % ranks and ranks % heads:
            return f"the number of KV heads, {heads},"
    for linear in _cut_by_depth(spec, ep):
        group = _group_size(linear, scheme, linears)
        if linear.in_features // ranks % group:
            groups = linear.in_features // group
            return f"the {groups} groups of {group} channels of {linear.name}"
    return ""


def _extents(spec: DecoderSpec, ep: bool) -> Iterator[tuple[int, str]]:
    yield spec.vocab_size, "the vocabulary"
    for layer in spec.layers:
        if isinstance(layer.mixer, ShortConvSpec | Mamba1Spec):
            yield layer.mixer.channels, "the convolutions' channels"
        elif isinstance(layer.mixer, GatedDeltaSpec):
            yield layer.mixer.num_key_heads, "the number of key heads"
        elif layer.mixer is not None:
            yield layer.mixer.num_heads, "the number of heads"
        # Of a single group every rank has some heads.
        if isinstance(layer.mixer, Mamba2Spec) and layer.mixer.num_groups > 1:
            yield layer.mixer.num_groups, "the number of groups of heads"
        if ep and _experts(layer):
            yield len(_experts(layer)), "the number of experts"
        for mlp in _cut_mlps(layer, ep):
            yield mlp.up.out_features, "the MLP's intermediate size"


def _cut_by_depth(spec: DecoderSpec, ep: bool) -> Iterator[LinearSpec]:
    """Linears whose input channels are shared: those after attention or a convolution, and inside
    an MLP."""
    for layer in spec.layers:
        yield from layer.mixer_linears[-1:]
        yield from (mlp.down for mlp in _cut_mlps(layer, ep))


def _experts(layer: LayerSpec) -> tuple[DenseMlpSpec, ...]:
    return layer.mlp.experts if isinstance(layer.mlp, MoeMlpSpec) else ()


def _cut_mlps(layer: LayerSpec, ep: bool) -> tuple[DenseMlpSpec, ...]:
    """Those of whose channels a rank has its share."""
    return layer.mlps[len(_experts(layer)) :] if ep else layer.mlps


def _group_size(
    linear: LinearSpec, scheme: Scheme, linears: Mapping[str, QuantizedLinear] | None
) -> int:
    """Input channels that share a weight scale in the engine, or are rotated together; 1: none."""
    own = scheme if linears is None else linears.get(linear.name)
    if own is None:
        return 1
    # W4A8 weights become E4M3 with one scale before they are cut.
    group = 0 if own.weight == "i4_f8" else own.group_size or 0
    return max(group, own.hadamard, 1)
