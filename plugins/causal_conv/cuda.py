"""causal_conv for GPUs: the convolution's kernels, with a SiLU."""

from trtc.plugins.convolution.lowering import lower_convolution
from trtc.plugins.gpu.lowering import Site, Variant


def lower(site: Site) -> tuple[Variant, ...]:
    return lower_convolution(site, "x", gated=False)
