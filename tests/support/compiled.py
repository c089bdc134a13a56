"""Compile what an operator is lowered to, for a named SM."""

from collections.abc import Iterator

from trtc.builder.targets.gpu.nvrtc import compile_cuda
from trtc.builder.targets.gpu.ptx import CompiledKernel
from trtc.builder.targets.gpu.triton import compile_kernel
from trtc.plugins.gpu.arch import ARCHS
from trtc.plugins.gpu.lowering import Launch, Variant
from trtc.plugins.gpu.sources import CudaSource
from trtc.protos.manifest import Limits

PAGE_SIZE = 16
LIMITS = Limits(max_batch_size=64, max_seq_len=1024, max_num_tokens=2048)


def compiled(variant: Variant, sm: int) -> Iterator[CompiledKernel]:
    """The kernels of a variant, each checked for what a launch of it may have."""
    for launch in variant.work:
        if isinstance(launch, Launch):
            source = launch.kernel
            kernel = (
                compile_cuda(source, sm)
                if isinstance(source, CudaSource)
                else compile_kernel(source, sm)
            )
            assert kernel.cubin.startswith(b"\x7fELF")
            assert kernel.shared_bytes <= ARCHS[sm].shared_bytes
            assert ".local" not in kernel.ptx.decode(), "indexes registers"
            assert len(kernel.parameters) == len(launch.arguments)
            yield kernel
