"""Composes the launches of several operators into one call."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from trtc.plugins.gpu.lowering import Collective, Gemm, Launch, Variant


def renamed(
    work: Iterable[Launch | Gemm | Collective], places: Mapping[str, str]
) -> tuple[Launch | Gemm, ...]:
    """The work of another operator, with its parameters renamed to those of the calling operator,
    or to SCRATCH and a buffer."""
    return tuple(_renamed(one, places) for one in work)


def _renamed(work: Launch | Gemm | Collective, places: Mapping[str, str]) -> Launch | Gemm:
    if isinstance(work, Gemm):
        return replace(work, x=places.get(work.x, work.x), out=places.get(work.out, work.out))
    assert isinstance(work, Launch)
    return replace(work, arguments=tuple(places.get(name, name) for name in work.arguments))


def for_rows(variants: tuple[Variant, ...], rows: int) -> Variant:
    """The first variant for `rows` rows."""
    return next(one for one in variants if one.max_rows >= rows)
