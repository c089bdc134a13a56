"""Checks, before any work, that a target has the kernels of a model's layers."""

from trtc.builder.spec import (
    DecoderSpec,
    GatedDeltaSpec,
    Mamba1Spec,
    Mamba2Spec,
    ShortConvSpec,
)
from trtc.builder.targets.base import Target
from trtc.protos.dtypes import DTYPES
from trtc.protos.errors import UnsupportedError
from trtc.protos.kv import SCALE_BYTES, KvDType


def check_mixers(spec: DecoderSpec, target: Target) -> None:
    """Layers that keep a state need a target that has room for it, attention sinks, latent
    attention and layers that read others' keys one that has kernels for them.

    Raises:
        UnsupportedError: the target has none.
    """
    if not target.has_sinks and any(attention.sinks for _, attention in spec.attentions):
        raise UnsupportedError(
            f"{target.name} has no kernels for the attention sinks of {spec.architecture}",
            field="--target",
            remedy="Build with --target cpu, or cuda:sm_90 and others",
        )
    if spec.keeps_states and not target.keeps_states:
        raise UnsupportedError(
            f"{target.name} has no kernels for the {_stateful(spec)} of "
            f"{spec.architecture}, nor room for their state",
            field="--target",
            remedy="Build with --target cpu, or cuda:sm_90 and others",
        )
    if spec.latent_attentions and not target.attends_to_latents:
        raise UnsupportedError(
            f"{target.name} has no kernels for the latent attention of {spec.architecture}",
            field="--target",
            remedy="Build with --target cpu, or cuda:sm_90 and others",
        )
    shares = any(attention.kv_layer is not None for _, attention in spec.attentions)
    if shares and not target.shares_keys:
        raise UnsupportedError(
            f"{target.name} has no kernels for layers that read the keys of others, as those of "
            f"{spec.architecture} do",
            field="--target",
            remedy="Build with --target cpu, or cuda:sm_90 and others",
        )
    if spec.layer_inputs is not None and not target.has_layer_inputs:
        raise UnsupportedError(
            f"{target.name} has no kernels for the inputs of each layer of {spec.architecture}",
            field="--target",
            remedy="Build with --target cpu, or cuda:sm_90 and others",
        )


def check_kv(spec: DecoderSpec, dtype: KvDType, target: Target) -> None:
    """A cache with a scale of each token and head needs kernels that read it.

    Raises:
        UnsupportedError: the target has none, or none for a layer of the model.
    """
    if dtype not in SCALE_BYTES:
        return
    if not target.scales_kv:
        raise UnsupportedError(
            f"{target.name} has no kernels for {_NAMES[dtype]}",
            field="--kv-dtype",
            remedy="Use bf16 or fp8, or --target cpu, or cuda:sm_90 and others",
        )
    if spec.latent_attentions:
        raise UnsupportedError(
            f"the latent attention of {spec.architecture} has no kernels for {_NAMES[dtype]}",
            field="--kv-dtype",
            remedy="Use bf16 or fp8",
        )
    per_byte = 8 // DTYPES[dtype].bits
    if odd := [one.head_dim for _, one in spec.attentions if one.head_dim % per_byte]:
        raise UnsupportedError(
            f"heads of {odd[0]} elements are not whole bytes of {_NAMES[dtype]}",
            field="--kv-dtype",
            remedy="Use bf16 or int8",
        )


def _stateful(spec: DecoderSpec) -> str:
    """What keeps states in a model that has some."""
    kinds = {type(layer.mixer) for layer in spec.layers}
    return next(name for kind, name in _STATEFUL.items() if kind in kinds)


_NAMES: dict[KvDType, str] = {"i8": "int8", "i4": "int4"}
_STATEFUL = {
    ShortConvSpec: "short convolutions",
    GatedDeltaSpec: "gated delta nets",
    Mamba1Spec: "Mamba layers",
    Mamba2Spec: "Mamba-2 layers",
}
