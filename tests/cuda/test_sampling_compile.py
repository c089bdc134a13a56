"""The sampler's kernels compile for every SM without a GPU, for small and odd vocabularies too."""

import re

import pytest

from tests.support.triton_kernels import needs_triton
from trtc.builder.targets.gpu.triton import compile_kernel
from trtc.plugins.gpu.arch import ARCHS
from trtc.plugins.gpu.sources import KernelSource
from trtc.plugins.sampling.tensors import DRAW_FILTERED, STAGES, TAKE_SAMPLED, sampling_tensors

needs_triton()

from trtc.plugins.sampling.cuda import stages  # noqa: E402

VOCABULARIES = (10, 300, 16_384, 32_003, 128_256, 151_936)


def compiled_ptx(source: object, sm: int) -> str:
    assert isinstance(source, KernelSource)
    kernel = compile_kernel(source, sm)
    ptx = kernel.ptx.decode()
    entry = re.search(r"\.visible \.entry \w+\((.*?)\n\)", ptx, re.DOTALL)
    assert entry is not None
    assert entry[1].count(".param") == len(source.parameters)
    assert kernel.cubin.startswith(b"\x7fELF")
    return ptx


@pytest.mark.parametrize("sm", ARCHS)
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
    for launch in sources.values():
        ptx = compiled_ptx(launch.kernel, sm)
        assert ("griddepcontrol.wait" in ptx) == launch.overlaps
        lets_start = launch.overlaps and launch not in made[TAKE_SAMPLED]
        assert ("griddepcontrol.launch_dependents" in ptx) == lets_start


@pytest.mark.parametrize(("vocab", "sm"), list(zip(VOCABULARIES, ARCHS, strict=True)))
def test_thresholds_compile(vocab: int, sm: int) -> None:
    """Each vocabulary for one SM: small, with blocks that are not full, and large."""
    _stats, thresholds, _first, search, *_more, finish, _draw = stages(vocab, sm)[DRAW_FILTERED]
    for source in (thresholds.kernel, search.kernel, finish.kernel):
        assert "griddepcontrol.wait" in compiled_ptx(source, sm) or sm < 90
