"""Grammars that are compiled once for each thread, as requests at once need them."""

import gc
from typing import Any

import pytest

from trtc.runtime.grammar.compiled import CompiledGrammar


class Masks:
    """Of a request (stands for GrammarMasks)."""

    def __init__(self, matcher: Any) -> None:
        self.matcher = matcher


class Compiler:
    def __init__(self) -> None:
        self.made: list[object] = []

    def __call__(self) -> Any:
        self.made.append(object())
        return self.made[-1]


def matcher_of(compiled: CompiledGrammar) -> tuple[Masks, object]:
    masks: Any = compiled.masks(Masks)  # type: ignore[arg-type, type-var]
    return masks, masks.matcher


def test_requests_at_once_have_matchers_of_their_own_up_to_a_limit() -> None:
    compiler = Compiler()
    compiled = CompiledGrammar(compiler, most=3)
    assert (len(compiler.made), compiled.is_ready) == (1, True)
    held, found = zip(*(matcher_of(compiled) for _ in range(3)), strict=True)
    assert list(found) == compiler.made
    assert compiled.is_ready  # no more are compiled
    more = [matcher_of(compiled) for _ in range(6)]
    assert [found.count(one) + [m for _, m in more].count(one) for one in compiler.made] == [3] * 3
    assert (len(compiler.made), len(held)) == (3, 3)


def test_requests_one_after_another_share_one() -> None:
    compiler = Compiler()
    compiled = CompiledGrammar(compiler, most=3)
    for _ in range(5):
        masks, matcher = matcher_of(compiled)
        assert not compiled.is_ready
        assert matcher is compiler.made[0]
        del masks
        gc.collect()
        assert compiled.is_ready
    assert len(compiler.made) == 1


def test_what_cannot_be_compiled_is_raised_at_once() -> None:
    def fails() -> Any:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        CompiledGrammar(fails, most=2)
