"""Sampling parameters in bodies, for dialects with trtc's names or renamed ones."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, cast

import msgspec

from trtc.protos.sampling import SAMPLING_PARAMETERS, SamplingOptions
from trtc.runtime.frontends.http.bodies import Fields

_NAMES = (*(one.name for one in SAMPLING_PARAMETERS), "logit_bias", "seed")

if TYPE_CHECKING:
    _Numbers = Fields
else:
    _Numbers = msgspec.defstruct(
        "_Numbers",
        [(one.name, one.kind | None, None) for one in SAMPLING_PARAMETERS],
        bases=(Fields,),
        kw_only=True,
    )


class SamplingFields(_Numbers, kw_only=True):
    """SAMPLING_PARAMETERS and the seed. None: not given."""

    seed: int | None = None


def sampling_of(fields: SamplingFields) -> SamplingOptions:
    """The given parameters, with `logit_bias` if the fields have one."""
    values = {name: getattr(fields, name, None) for name in _NAMES}
    given = {name: value for name, value in values.items() if value is not None}
    for name, said in _SAID_OTHERWISE.items():
        if name in given:
            given[name] = said(given[name])
    return cast(SamplingOptions, given)


def _seed(value: int) -> int:
    """A signed 64-bit seed as an unsigned one."""
    return value % 2**64 if -(2**63) <= value < 0 else value


_SAID_OTHERWISE: Mapping[str, Callable[[int], int]] = {
    "seed": _seed,
    "top_k": lambda value: 0 if value == -1 else value,
}
