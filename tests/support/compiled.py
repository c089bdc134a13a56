"""Compile what an operator is lowered to, for a named SM."""

from collections.abc import Iterator, Sequence

from trtc.builder.targets.gpu.nvrtc import compile_cuda
from trtc.builder.targets.gpu.ptx import CompiledKernel
from trtc.builder.targets.gpu.triton import compile_kernels
from trtc.plugins.gpu.arch import ARCHS
from trtc.plugins.gpu.lowering import Launch, Variant
from trtc.plugins.gpu.sources import CudaSource, KernelSource
from trtc.protos.manifest import Limits

PAGE_SIZE = 16
LIMITS = Limits(max_batch_size=64, max_seq_len=1024, max_num_tokens=2048)


def compile_sources(
    sources: Sequence[KernelSource | CudaSource], sm: int
) -> Iterator[CompiledKernel]:
    """Each in its turn; Triton's are compiled in one process, which takes long to start."""
    triton = tuple(one for one in sources if isinstance(one, KernelSource))
    made = iter(compile_kernels(triton, sm))
    for one in sources:
        yield next(made) if isinstance(one, KernelSource) else compile_cuda(one, sm)


def compiled(variant: Variant, sm: int) -> Iterator[CompiledKernel]:
    """The kernels of a variant, each checked for what a launch of it may have."""
    launches = [one for one in variant.work if isinstance(one, Launch)]
    kernels = compile_sources([one.kernel for one in launches], sm)
    for launch, kernel in zip(launches, kernels, strict=True):
        assert kernel.cubin.startswith(b"\x7fELF")
        assert kernel.shared_bytes <= ARCHS[sm].shared_bytes
        assert ".local" not in kernel.ptx.decode(), "indexes registers"
        assert len(kernel.parameters) == len(launch.arguments)
        yield kernel
