"""Compile what an operator is lowered to, for a named SM."""

import atexit
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from trtc.builder.targets.cuda_lowering import source_key
from trtc.builder.targets.gpu.nvrtc import compile_cuda
from trtc.builder.targets.gpu.ptx import CompiledKernel, assemble, check_types
from trtc.builder.targets.gpu.triton import compile_kernels_in
from trtc.builder.targets.gpu.triton_process import TritonProcess
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


_KNOWN: dict[tuple[str, int], CompiledKernel] = {}


def compile_sources(
    sources: Sequence[KernelSource | CudaSource], sm: int
) -> Sequence[CompiledKernel]:
    """Each in its turn, once a process: that a compiler gives the same bytes again is not what is
    tested."""
    triton = [one for one in sources if isinstance(one, KernelSource)]
    made = iter(_compile_triton(triton, sm))
    return [
        next(made) if isinstance(one, KernelSource) else _compile_cuda(one, sm) for one in sources
    ]


def compile_once(sources: Sequence[KernelSource], sm: int) -> tuple[CompiledKernel, ...]:
    """`compile_kernels` for builds whose kernels are not what is tested: each once a process."""
    keys = [(source_key(one), sm) for one in sources]
    new = {key: one for key, one in zip(keys, sources, strict=True) if key not in _KNOWN}
    compiled = compile_kernels_in(_triton(), tuple(new.values()), sm)
    _KNOWN.update(zip(new, compiled, strict=True))
    return tuple(_KNOWN[key] for key in keys)


def stand_in(source: KernelSource | CudaSource, sm: int) -> CompiledKernel:
    """A kernel whose code is the key of its source."""
    key = source_key(source)
    return CompiledKernel(
        _entry(source), source.parameters, 32, 0, sm, f"sm_{sm}", "", b"", key.encode()
    )


def stand_in_for_each(sources: Sequence[KernelSource], sm: int) -> tuple[CompiledKernel, ...]:
    """`compile_kernels` for builds whose kernels neither run nor are read."""
    return tuple(stand_in(one, sm) for one in sources)


@functools.cache
def _triton() -> TritonProcess:
    """For the tests of this process."""
    process = TritonProcess()
    atexit.register(process.close)
    return process


def _compile_triton(sources: Sequence[KernelSource], sm: int) -> Sequence[CompiledKernel]:
    """As `compile_once`, and of SMs that have the same code for the first of them, and assembled
    for each. Each has its own limit of shared memory, which is not a part of the code."""
    with_code_of: dict[int, list[KernelSource]] = {}
    for source in sources:
        check_types(source.parameters, sm)
        with_code_of.setdefault(_first_with_its_code(source, sm), []).append(source)
    for first, some in with_code_of.items():
        roomy = [replace(one, max_shared_bytes=ARCHS[first].shared_bytes) for one in some]
        for source, kernel in zip(some, compile_once(roomy, first), strict=True):
            assert kernel.shared_bytes <= source.max_shared_bytes
            key = source_key(source), sm
            if key not in _KNOWN:
                _KNOWN[key] = kernel if sm == first else _assembled_for(kernel, sm)
    return [_KNOWN[source_key(one), sm] for one in sources]


def _first_with_its_code(source: KernelSource, sm: int) -> int:
    """The first SM of the generation with the types of this source: Triton's code for those after
    it differs by their names (`test_sms_of_one_generation_have_the_same_code`)."""
    has_e4m3 = any(one.dtype == "f8e4m3" for one in source.parameters)
    alike = (one for one in ARCHS.values() if one.sm // 10 == sm // 10)
    return next(one.sm for one in alike if one.has_e4m3 or not has_e4m3)


def _assembled_for(kernel: CompiledKernel, sm: int) -> CompiledKernel:
    """Code of another SM of the generation as Triton gives it for this one."""
    target = ARCHS[sm].name
    ptx = kernel.ptx.decode().replace(f".target {kernel.ptx_target}", f".target {target}", 1)
    cubin = assemble(ptx, sm)
    return replace(kernel, sm=sm, ptx_target=target, ptx=ptx.encode(), cubin=cubin)


def _compile_cuda(source: CudaSource, sm: int) -> CompiledKernel:
    key = source_key(source), sm
    if key not in _KNOWN:
        _KNOWN[key] = compile_cuda(source, sm)
    return _KNOWN[key]


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
