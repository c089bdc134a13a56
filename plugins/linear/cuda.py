"""linear on a GPU: a GEMM of plugins/gemm."""

from trtc.plugins.gemm.cuda import lower_gemm
from trtc.plugins.gpu.lowering import Site, Variant


def lower(site: Site) -> tuple[Variant, ...]:
    return lower_gemm(site)
