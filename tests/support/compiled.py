"""Compile what an operator is lowered to, for a named SM."""

from collections.abc import Iterator

from trtc.plugins.cuda.compile import SHARED_BYTES, CompiledKernel, compile_kernel
from trtc.plugins.cuda.cpp import CudaSource
from trtc.plugins.cuda.launch import Launch, Variant
from trtc.plugins.cuda.nvrtc import compile_cuda
from trtc.protos.manifest import KvGeometry, Limits

KV = KvGeometry(num_layers=1, page_size=16, num_kv_heads=8, head_dim=128, dtype="bf16")
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
            assert kernel.shared_bytes <= SHARED_BYTES[sm]
            assert ".local" not in kernel.ptx.decode(), "indexes registers"
            assert len(kernel.parameters) == len(launch.arguments)
            yield kernel
