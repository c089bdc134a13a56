"""Compile what an operator is lowered to, for a named SM."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from trtc.builder.targets.cuda_lowering import source_key
from trtc.builder.targets.gpu.nvrtc import compile_cuda
from trtc.builder.targets.gpu.ptx import CompiledKernel
from trtc.builder.targets.gpu.triton import compile_kernels
from trtc.plugins.gpu.arch import ARCHS, Arch
from trtc.plugins.gpu.lowering import Launch, Variant
from trtc.plugins.gpu.sources import CudaSource, KernelSource
from trtc.protos.manifest import Limits

PAGE_SIZE = 16
LIMITS = Limits(max_batch_size=64, max_seq_len=1024, max_num_tokens=2048)


def one_of_each(facts: Callable[[Arch], object]) -> list[int]:
    """The first SM of the table with each of these facts: all that kernels ask of it.

    For kernels at the sizes of models, where another SM with the same facts would show nothing that
    is new: test_every_arch.py compiles every operator for every SM.
    """
    found: dict[object, int] = {}
    for arch in ARCHS.values():
        found.setdefault(facts(arch), arch.sm)
    return list(found.values())


def _entry(source: KernelSource | CudaSource) -> str:
    return source.entry if isinstance(source, CudaSource) else str(source.function.fn.__name__)


def compile_sources(
    sources: Sequence[KernelSource | CudaSource], sm: int
) -> Iterator[CompiledKernel]:
    """Each in its turn; Triton's are compiled in one process, which takes long to start."""
    triton = tuple(one for one in sources if isinstance(one, KernelSource))
    made = iter(compile_kernels(triton, sm))
    for one in sources:
        yield next(made) if isinstance(one, KernelSource) else compile_cuda(one, sm)


_KNOWN: dict[tuple[str, int], CompiledKernel] = {}


def compile_once(sources: Sequence[KernelSource], sm: int) -> tuple[CompiledKernel, ...]:
    """`compile_kernels` for builds whose kernels are not what is tested: each once a process."""
    keys = [(source_key(one), sm) for one in sources]
    new = {key: one for key, one in zip(keys, sources, strict=True) if key not in _KNOWN}
    _KNOWN.update(zip(new, compile_kernels(tuple(new.values()), sm), strict=True))
    return tuple(_KNOWN[key] for key in keys)


def together(variants: Sequence[Variant]) -> Variant:
    """The work of all, to compile in one process."""
    return replace(variants[-1], work=tuple(one for each in variants for one in each.work))


def compiled(variant: Variant, sm: int, entries: Sequence[str] = ()) -> Iterator[CompiledKernel]:
    """The kernels of a variant, or those of these entries, each checked for what a launch of it may
    have."""
    launches = [
        one
        for one in variant.work
        if isinstance(one, Launch) and (not entries or _entry(one.kernel) in entries)
    ]
    kernels = compile_sources([one.kernel for one in launches], sm)
    for launch, kernel in zip(launches, kernels, strict=True):
        assert kernel.cubin.startswith(b"\x7fELF")
        assert kernel.shared_bytes <= ARCHS[sm].shared_bytes
        assert ".local" not in kernel.ptx.decode(), "indexes registers"
        assert len(kernel.parameters) == len(launch.arguments) + len(launch.maps)
        yield kernel
