"""short_conv for GPUs: the convolution's kernels, with gates."""

from trtc.plugins.convolution.lowering import lower_convolution
from trtc.plugins.gpu.lowering import Site, Variant


def lower(site: Site) -> tuple[Variant, ...]:
    return lower_convolution(site, "gated", gated=True)
