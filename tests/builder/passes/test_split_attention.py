"""builder/passes/split_attention.py."""

from dataclasses import replace

import msgspec
import pytest

from tests.builder.passes.tiny import (
    LIMITS,
    Loose,
    Tiny,
    assert_same_function,
    assert_unchanged,
    attributes,
    nodes,
    ops,
    tiny,
)
from trtc.builder.module import Module
from trtc.builder.passes.base import run_passes
from trtc.builder.passes.split_attention import LEAST_SPLITS, SPLIT_ATTENTION
from trtc.plugins.attention.split_kv import TENSORRT


def for_contexts_of(module: Module, max_seq_len: int) -> Module:
    return replace(module, limits=msgspec.structs.replace(LIMITS, max_seq_len=max_seq_len))


@pytest.mark.parametrize("kind", [Tiny(), Tiny("fp8", kv_dtype="f8e4m3"), Tiny(gemma=True)])
def test_long_contexts_are_split_and_compute_the_same(kind: Tiny) -> None:
    module, reader = tiny(kind)
    old = for_contexts_of(module, 4000)
    new, changed = run_passes(old, [Loose(SPLIT_ATTENTION)])
    assert changed
    windowed = 1 if kind.gemma else 0
    counts = ops(new)
    assert counts["trtc.attention_split"] == counts["trtc.attention_combine"] == 2 - windowed
    assert counts["trtc.paged_attention"] == windowed, "a window of few keys stays whole"
    assert attributes(nodes(new, "attention_split")[0])["splits"] == 16
    assert_same_function(old, new, reader, 1e-6)
    assert_unchanged(SPLIT_ATTENTION, new)


def test_short_contexts_stay_whole() -> None:
    module, _ = tiny(Tiny())
    longest = (LEAST_SPLITS - 1) * TENSORRT.keys
    assert_unchanged(SPLIT_ATTENTION, for_contexts_of(module, longest))
    _, changed = SPLIT_ATTENTION(for_contexts_of(module, longest + 1))
    assert changed
