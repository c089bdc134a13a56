"""Every operator's kernels compile for every SM of the table, or say what the SM lacks.

One specialisation of each kernel, small. What larger ones do is in the operators' own files.
"""

import functools
from collections.abc import Mapping

import pytest

from tests.support.arch_sites import SITES
from tests.support.compiled import compile_sources
from tests.support.triton_kernels import needs_triton
from trtc.builder.targets.gpu.nvrtc import compile_cuda
from trtc.builder.targets.gpu.ptx import CompiledKernel
from trtc.builder.targets.gpu.triton import compile_kernel, compile_kernels
from trtc.plugins.gpu.arch import ARCHS
from trtc.plugins.gpu.lowering import Launch
from trtc.plugins.gpu.sources import CudaSource, KernelSource
from trtc.protos.errors import UnsupportedError

needs_triton()

from trtc.builder.targets.gpu.lowerings import lowerings  # noqa: E402
from trtc.plugins.gemm.triton.weights import E2M1_POWERS, E2M1_UNITS, SIX_BITS  # noqa: E402

NO_KERNELS = {"all_reduce"}
"""NCCL alone."""
_SCALES_OF_ROWS = ("row_scale", "given_scale", "hidden_scale")
_E2M1 = {
    ("CODEBOOK", 2): " of E2M1",
    ("NIBBLES", E2M1_POWERS.value): " of E2M1",
    ("NIBBLES", E2M1_UNITS.value): " of E2M1 in units",
}
"""By a constant of a kernel."""
Sources = dict[tuple[str, str], KernelSource | CudaSource]


def sources_of(op: str, sm: int) -> Sources:
    """The first specialisation of each of its kernels, by the file and entry, and the first that
    has scales of rows, sums of squares, decays of channels, a selection of tokens, or weights of 6
    bits or of E2M1."""
    quantised = "f8e4m3" if ARCHS[sm].has_e4m3 else "i8"
    found: Sources = {}
    for make in SITES[op]:
        for variant in lowerings()[op](make(sm, quantised)):
            for launch in variant.work:
                if isinstance(launch, Launch):
                    found.setdefault(_place(launch.kernel), launch.kernel)
    return found


def _place(source: KernelSource | CudaSource) -> tuple[str, str]:
    by_row = " by row" * any(one.name in _SCALES_OF_ROWS for one in source.parameters)
    by_row += " with squares" * any(one.name == "squares" for one in source.parameters)
    constants = source.constants
    is_split = constants.get("NIBBLES") == SIX_BITS.value or constants.get("SIX_BITS")
    of_codes = "".join(
        kind for (name, value), kind in _E2M1.items() if constants.get(name) == value
    )
    kind = by_row + " in six bits" * bool(is_split) + of_codes
    if isinstance(source, CudaSource):
        return source.file, source.entry + kind
    kind += " by channel" * (constants.get("DECAYS", 1) != 1)
    kind += " of selected tokens" * bool(constants.get("MOST_SEEN"))
    return source.function.fn.__module__, source.function.fn.__name__ + kind


@functools.cache
def compiled(sm: int) -> Mapping[tuple[str, str], CompiledKernel]:
    """All operators' kernels, each once."""
    sources: Sources = {}
    for op in SITES:
        sources = sources_of(op, sm) | sources
    return dict(zip(sources, compile_sources(list(sources.values()), sm), strict=True))


def test_every_operator_has_a_site() -> None:
    assert set(SITES) == set(lowerings())


@pytest.mark.parametrize("sm", ARCHS)
@pytest.mark.parametrize("op", SITES)
def test_kernels_compile(op: str, sm: int) -> None:
    places = sources_of(op, sm)
    assert bool(places) != (op in NO_KERNELS)
    for place in places:
        kernel = compiled(sm)[place]
        assert kernel.sm == sm and kernel.cubin.startswith(b"\x7fELF")
        assert kernel.ptx_target.rstrip("a") == ARCHS[sm].name
        assert kernel.shared_bytes <= ARCHS[sm].shared_bytes
        assert ".local" not in kernel.ptx.decode(), "spills, or indexes registers"


@pytest.mark.parametrize("op", ["quantize", "rms_norm", "swiglu", "linear"])
@pytest.mark.parametrize("sm", [sm for sm, arch in ARCHS.items() if not arch.has_e4m3])
def test_a_type_that_an_sm_lacks_is_named(op: str, sm: int) -> None:
    refused = 0
    for variant in lowerings()[op](SITES[op][-1](sm, "f8e4m3")):
        for launch in variant.work:
            if isinstance(launch, Launch):
                compiler = compile_cuda if isinstance(launch.kernel, CudaSource) else compile_kernel
                with pytest.raises(UnsupportedError, match=f"sm_{sm} has no E4M3"):
                    compiler(launch.kernel, sm)  # type: ignore[arg-type]
                refused += 1
    assert refused


@pytest.mark.parametrize("sm", [86, 89])
def test_sms_of_one_generation_have_the_same_code(sm: int) -> None:
    """What `compile_sources` makes of another SM's is what Triton gives for this one."""
    found = [*sources_of("linear", sm).values(), *sources_of("rms_norm", sm).values()]
    sources = [one for one in found if isinstance(one, KernelSource)]
    assert len(sources) > 5
    assert list(compile_kernels(sources, sm)) == compile_sources(sources, sm)


@pytest.mark.parametrize("sm", [89, 90])
def test_a_kernel_has_the_same_bytes_alone_and_among_others(sm: int) -> None:
    place, source = next(iter(sources_of("quantize", sm).items()))
    assert isinstance(source, KernelSource)
    assert compile_kernel(source, sm) == compiled(sm)[place]
