"""Lowerings with few persistent programs: on the CPU idle ones take their time."""

from dataclasses import replace

from trtc.plugins.gpu.lowering import ONE, Extent, Launch, Site, Variant
from trtc.plugins.gpu.sources import CudaSource

_PROGRAMS = 3


def expanded_latent_attention(site: Site) -> tuple[Variant, ...]:
    """Every launch of the operator; those that expand latents share their tiles as well."""
    from trtc.plugins.expanded_latent_attention.cuda import lower

    *others, prompts = lower(site)
    work = [replace(one, grid=(Extent(times=_PROGRAMS), ONE, ONE)) for one in launches(prompts)]
    assert isinstance(work[-1].kernel, CudaSource)
    return (*others, replace(prompts, work=tuple(work)))


def launches(variant: Variant) -> list[Launch]:
    return [one for one in variant.work if isinstance(one, Launch)]
