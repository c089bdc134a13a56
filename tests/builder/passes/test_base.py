"""builder/passes/base.py: what run_passes checks around every pass."""

from dataclasses import dataclass, field

import pytest

from tests.builder.passes.tiny import Hand, Tiny, assert_same_function, tiny
from trtc.builder.module import Module
from trtc.builder.passes.base import Rewrite, run_passes
from trtc.builder.passes.order import NATIVE_PASSES
from trtc.builder.passes.rewriter import Rewriter
from trtc.protos.errors import CheckpointError, InvariantError


@dataclass(frozen=True)
class Fake:
    """A pass that does what it is told to."""

    name: str
    requires: frozenset[str] = frozenset()
    result: Module | None = None
    error: Exception | None = None
    seen: list[str] = field(default_factory=list)

    def __call__(self, module: Module) -> tuple[Module, bool]:
        self.seen.append(self.name)
        if self.error:
            raise self.error
        return (module, False) if self.result is None else (self.result, True)


def _module() -> Module:
    hand = Hand()
    x = hand.input("x", "T", 8)
    return hand.module(hand.node("add", "sum", [x, x], "T", 8))


def test_passes_run_in_order_and_say_whether_anything_changed() -> None:
    module, seen = _module(), list[str]()
    assert run_passes(module, [Fake("a", seen=seen), Fake("b", seen=seen)]) == (module, False)
    assert seen == ["a", "b"]
    other = _module()
    result, changed = run_passes(module, [Fake("a", result=other), Fake("b")])
    assert result is other and changed


def test_a_pass_before_what_it_requires_is_refused() -> None:
    late = Fake("late", requires=frozenset({"early"}))
    with pytest.raises(InvariantError, match=r"pass late failed: it requires early .*run: none"):
        run_passes(_module(), [late])
    run_passes(_module(), [Fake("early"), late])


def test_a_failure_names_the_pass_and_those_already_run() -> None:
    broken = Fake("broken", error=KeyError("weight"))
    with pytest.raises(InvariantError, match=r"pass broken failed: 'weight' .*run: a, b\)"):
        run_passes(_module(), [Fake("a"), Fake("b"), broken])


def test_the_users_errors_pass_through() -> None:
    error = CheckpointError("is truncated", field="model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        run_passes(_module(), [Fake("reads", error=error)])
    assert caught.value is error


def test_a_pass_that_leaves_an_unsound_module_is_named() -> None:
    def forget_a_recipe(rewriter: Rewriter) -> bool:
        rewriter.recipes.pop("embedding.weight")
        return True

    module, _ = tiny(Tiny())
    with pytest.raises(InvariantError, match=r"pass forget failed: .*embedding\.weight: .*recipe"):
        run_passes(module, [Rewrite("forget", forget_a_recipe)])


def test_an_unsound_module_is_refused_before_the_first_pass() -> None:
    module = _module()
    module.model.graph.node[0].input[0] = "nothing"
    with pytest.raises(InvariantError, match="nothing: sum reads it before it is made"):
        run_passes(module, [])


def test_verify_sees_each_change_and_may_refuse_it() -> None:
    module, reader = tiny(Tiny(layers=1))
    steps: list[tuple[int, int]] = []

    def verify(old: Module, new: Module) -> None:
        steps.append((len(old.model.graph.node), len(new.model.graph.node)))
        assert_same_function(old, new, reader, tolerance=1e-5)

    run_passes(module, NATIVE_PASSES, verify=verify)
    assert len(steps) >= 8
    assert all(steps[i][1] == steps[i + 1][0] for i in range(len(steps) - 1))

    def refuse(old: Module, new: Module) -> None:
        raise AssertionError("outputs differ")

    with pytest.raises(InvariantError, match="pass lower_linears failed: outputs differ"):
        run_passes(module, NATIVE_PASSES, verify=refuse)
