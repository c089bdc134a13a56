"""The sampler's kernels compile without a GPU, for small and odd vocabularies too."""

import re
from collections.abc import Iterator, Sequence

import pytest

from tests.support.compiled import compile_sources, one_of_each
from tests.support.triton_kernels import needs_triton
from trtc.plugins.gpu.arch import ARCHS
from trtc.plugins.gpu.lowering import Launch
from trtc.plugins.gpu.sources import KernelSource
from trtc.plugins.sampling.tensors import DRAW_FILTERED, STAGES, TAKE_SAMPLED, sampling_tensors

needs_triton()

from trtc.plugins.sampling.cuda import stages  # noqa: E402

VOCABULARIES = (10, 300, 16_384, 32_003, 128_256, 151_936)


def compiled_ptx(launches: Sequence[Launch], sm: int) -> Iterator[str]:
    """PTX of each."""
    sources = [launch.kernel for launch in launches]
    for source, kernel in zip(sources, compile_sources(sources, sm), strict=True):
        assert isinstance(source, KernelSource)
        ptx = kernel.ptx.decode()
        entry = re.search(r"\.visible \.entry \w+\((.*?)\n\)", ptx, re.DOTALL)
        assert entry is not None
        assert entry[1].count(".param") == len(source.parameters)
        assert kernel.cubin.startswith(b"\x7fELF")
        yield ptx


SMS = one_of_each(lambda arch: arch.has_pdl)


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_stages_ask_an_sm_for_early_starts_alone(vocab: int) -> None:
    for arch in ARCHS.values():
        (like,) = [sm for sm in SMS if ARCHS[sm].has_pdl == arch.has_pdl]
        assert stages(vocab, arch.sm) == stages(vocab, like)


@pytest.mark.parametrize("sm", SMS)
def test_every_stage_compiles(sm: int) -> None:
    """But for the search for thresholds, which takes longest and has a test of its own."""
    names = {one.name for one in sampling_tensors(128_256)}
    made = stages(128_256, sm)
    assert set(made) == set(STAGES)
    sources = {}
    for stage, launches in made.items():
        for launch in launches:
            assert set(launch.arguments) - names <= {"logits", "token_ids", "dims"}
            assert launch.overlaps == (sm >= 90)
            if stage != DRAW_FILTERED:
                sources[repr(launch.kernel)] = launch
    different = list(sources.values())
    for launch, ptx in zip(different, compiled_ptx(different, sm), strict=True):
        assert ("griddepcontrol.wait" in ptx) == launch.overlaps
        lets_start = launch.overlaps and launch not in made[TAKE_SAMPLED]
        assert ("griddepcontrol.launch_dependents" in ptx) == lets_start


COMPILED = {80: 10, 86: 10, 89: 10, 90: 32_003, 100: 128_256, 120: 300}
"""Vocabulary by SM: of one block that is not full, odd, and large."""


@pytest.mark.parametrize("sm", ARCHS)
def test_thresholds_compile(sm: int) -> None:
    vocab = COMPILED[sm]
    _stats, thresholds, _first, search, *_more, finish, _draw = stages(vocab, sm)[DRAW_FILTERED]
    for ptx in compiled_ptx((thresholds, search, finish), sm):
        assert "griddepcontrol.wait" in ptx or sm < 90
