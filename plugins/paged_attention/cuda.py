"""How paged_attention runs on a GPU: sequences with one new token split over their keys, all others
in tiles."""

from trtc.plugins.gpu.lowering import Site, Variant
from trtc.plugins.paged_attention import cuda_prefill_sm90, triton
from trtc.plugins.paged_attention.cuda_cpp import supports
from trtc.plugins.paged_attention.cuda_split import lengths, split


def lower(site: Site) -> tuple[Variant, ...]:
    max_rows = site.limits.max_num_tokens
    if not supports(site):
        # f32, for comparisons with other engines, and sizes that no model has.
        return (Variant(work=(triton.prefill(site, least_new=1),), max_rows=max_rows),)
    on_sm90 = cuda_prefill_sm90.available(site)
    more = cuda_prefill_sm90.prefill(site) if on_sm90 else triton.prefill(site, least_new=2)
    decodes = [(rows, split(site, times=times)) for rows, times in lengths(site)]
    mixed = split(site, counter=on_sm90)
    return (
        *(
            Variant(work=one.launches, max_rows=rows, kind="decode", scratch=one.scratch)
            for rows, one in decodes
        ),
        Variant(work=(*mixed.launches, more), max_rows=max_rows, scratch=mixed.scratch),
    )
