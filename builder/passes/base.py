"""The contract of a pass, and running a list of passes with checks before and after each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from trtc.builder.module import Module
from trtc.builder.passes.invariants import check_module
from trtc.builder.passes.rewriter import Rewriter
from trtc.protos.errors import InvariantError, UserError

Verify = Callable[[Module, Module], None]
"""Called with the module before and after a pass that changed it; raises when they differ."""


class Pass(Protocol):
    """A rewrite. `module` in, `(module, changed)` out; the one given is never altered."""

    @property
    def name(self) -> str: ...

    @property
    def requires(self) -> frozenset[str]:
        """Names of passes that must have run before."""
        ...

    def __call__(self, module: Module) -> tuple[Module, bool]: ...


@runtime_checkable
class InPlace(Pass, Protocol):
    """A pass that rewrites an open module, which one after another share."""

    def apply(self, rewriter: Rewriter) -> bool:
        """Rewrites in place and says whether it did anything."""
        ...


@dataclass(frozen=True)
class Rewrite:
    """A pass made of one function over an open module."""

    name: str
    apply: Callable[[Rewriter], bool]
    """Rewrites in place and says whether it did anything."""
    requires: frozenset[str] = frozenset()

    def __call__(self, module: Module) -> tuple[Module, bool]:
        return rewritten(self, module, Rewriter(module))


def rewritten(step: InPlace, module: Module, rewriter: Rewriter) -> tuple[Module, bool]:
    """What a pass makes of `module`, which `rewriter` has open and then has the result of."""
    changed = step.apply(rewriter)
    result = rewriter.module() if changed else module
    rewriter.begin(result)
    return result, changed


def run_passes(
    module: Module, passes: Sequence[Pass], *, verify: Verify | None = None
) -> tuple[Module, bool]:
    """Run `passes` in order; the module is checked before the first and after each that changed it.

    Returns:
        The rewritten module, and whether any pass changed it.

    Raises:
        InvariantError: a pass ran before one that it requires, failed, or left a module that is
            not sound; the message names the pass and those already run.
        UserError: the checkpoint does not hold what a pass reads; raised as it is.
    """
    check_module(module)
    done: list[str] = []
    changed = False
    rewriter: Rewriter | None = None
    for step in passes:
        missing = sorted(step.requires - set(done))
        if missing:
            raise _failure(step, done, f"it requires {', '.join(missing)}")
        before = module
        try:
            if isinstance(step, InPlace):
                rewriter = rewriter or Rewriter(before)
                module, did_change = rewritten(step, before, rewriter)
            else:
                module, did_change = step(before)
                rewriter = None if did_change else rewriter
            if did_change:
                check_module(module)
                if verify is not None:
                    verify(before, module)
        except UserError:
            raise
        except Exception as error:
            raise _failure(step, done, str(error) or type(error).__name__) from error
        changed = changed or did_change
        done.append(step.name)
    return module, changed


def _failure(step: Pass, done: Sequence[str], problem: str) -> InvariantError:
    return InvariantError(
        f"pass {step.name} failed: {problem} (already run: {', '.join(done) or 'none'})"
    )
