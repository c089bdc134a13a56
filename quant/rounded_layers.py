"""Decoder layers whose linears are rounded, in memory and in a journal, which has codes of 4 and 6
bits packed."""

import json
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

import msgspec
import torch

from trtc.protos.manifest import LayerError
from trtc.quant.gptq import Rounded
from trtc.quant.journal import Journal, SavedLayer
from trtc.quant.packed_codes import pack_codes, unpack_codes
from trtc.quant.site_format import SiteFormat

_CODES, _SCALES, _UNIT = "codes", "scales", "scale_unit"
_SCALE_BYTES = 2
_FORMATS = "formats"


@dataclass(frozen=True)
class RoundedLayer:
    """A decoder layer whose linears are rounded."""

    index: int
    linears: Mapping[str, Rounded]
    """By their names in the model."""
    errors: tuple[LayerError, ...]
    """On held-out text, in the order of the model."""


def save_rounded(
    journal: Journal,
    layer: RoundedLayer,
    formats: Mapping[str, SiteFormat],
    hidden: Iterable[torch.Tensor],
) -> None:
    """Write a layer, and the hidden states after it.

    Args:
        formats: of its linears, and maybe of others.
    """
    tensors = {
        f"{name}|{part}": value
        for name, rounded in layer.linears.items()
        for part, value in _stored(rounded, formats[name]).items()
    }
    own = {name: formats[name] for name in layer.linears}
    about = {_FORMATS: json.dumps(msgspec.to_builtins(own))}
    journal.save(layer.index, SavedLayer(tensors, layer.errors, about), hidden)


def read_rounded(
    journal: Journal,
    index: int,
    names: Container[str] | None = None,
    device: torch.device | str = "cpu",
) -> RoundedLayer:
    """What `save_rounded` was given.

    Args:
        names: of the linears to read; None: all.
        device: where their codes are unpacked, and stay.
    """

    def is_wanted(name: str) -> bool:
        return names is None or name in names

    saved = journal.layer(index, lambda tensor: is_wanted(tensor.rpartition("|")[0]))
    formats = msgspec.convert(json.loads(saved.about[_FORMATS]), dict[str, SiteFormat])
    linears = {
        name: _read(saved.tensors, name, to, device)
        for name, to in formats.items()
        if is_wanted(name)
    }
    return RoundedLayer(index, linears, saved.errors)


def stored_bytes(to: SiteFormat, out_features: int, in_features: int) -> int:
    """What a weight takes in a journal."""
    groups = in_features // to.group_size if to.group_size else 1
    return out_features * (in_features * to.code_bits // 8 + groups * _SCALE_BYTES)


def _stored(rounded: Rounded, to: SiteFormat) -> dict[str, torch.Tensor]:
    """The tensors of a weight, on the CPU; codes are packed where they are."""
    codes = pack_codes(rounded.codes, to) if to.is_gptq else rounded.codes
    parts = {_CODES: codes, _SCALES: rounded.scales.bfloat16(), _UNIT: rounded.scale_unit}
    return {key: part.to("cpu") for key, part in parts.items() if part is not None}


def _read(
    tensors: Mapping[str, torch.Tensor], name: str, to: SiteFormat, device: torch.device | str
) -> Rounded:
    """What `_stored` was given, on a device."""
    codes = tensors[f"{name}|{_CODES}"].to(device)
    unit = tensors.get(f"{name}|{_UNIT}")
    return Rounded(
        unpack_codes(codes, to) if to.is_gptq else codes,
        tensors[f"{name}|{_SCALES}"].to(device).float(),
        None if unit is None else unit.to(device),
    )
